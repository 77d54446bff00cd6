"""Sound files of every format that is read, and how a command reads them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from benchmarks.fuzz.run import Reader
from proctor.errors import TransportError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tests"))
from helpers import traincheck
from helpers.live.transport import batch, encoded
from helpers.loops import loop
from helpers.runs import write_run


def _run(folder: Path) -> list[Path]:
    _pack(folder)
    run = write_run(folder / "run", [loop(steps=5), loop(steps=5, rank=1, world=2)])
    return [path for path in sorted(run.rglob("*")) if path.is_file()]


def _read_run(folder: Path) -> None:
    from proctor.invariants.pack import read_pack
    from proctor.invariants.trace import Run
    from proctor.verify.checker import check
    from proctor.verify.coverage import coverage

    run = Run(folder / "run")
    check(run.trace, [read_pack(folder / "pack.json")])
    coverage(run.trace)


def _pack_of_ours() -> Any:
    import tempfile

    from proctor.infer.engine import infer
    from proctor.invariants.pack import Pack
    from proctor.invariants.relations import registry
    from proctor.invariants.trace import Trace

    with tempfile.TemporaryDirectory() as place:
        runs = [write_run(Path(place) / f"{i}", [loop(steps=12)]) for i in range(2)]
        return Pack(infer(Trace.load(runs), [registry()[n] for n in ("contain", "sequence", "argument")], strict=True)[0])


def _pack(folder: Path) -> list[Path]:
    from proctor.invariants.pack import write_pack

    write_pack(_pack_of_ours(), folder / "pack.json")
    return [folder / "pack.json"]


def _read_pack(folder: Path) -> None:
    from proctor.invariants.pack import read_pack
    from proctor.invariants.relations import registry

    for rule in read_pack(folder / "pack.json", list(registry())).invariants:
        relation = registry().get(rule.relation)
        if relation is not None:
            relation.needs(rule.hypothesis)
            relation.say(rule.hypothesis)


_PAGE: Final = """[job]
name = "job"
runbook = "https://wiki.example.org/{code}"
deliver_s = 60
[budget]
pages_per_hour = 6
digest_s = 30.0
[sinks.oncall]
type = "pagerduty"
routing_key_file = "key"
[sinks.team]
type = "alertmanager"
urls = ["http://127.0.0.1:9093"]
labels = { team = "x" }
[[maintenance]]
weekly = "sat 22:00 - sun 06:00"
timezone = "Europe/Berlin"
reason = "storage"
[heartbeat]
sink = "team"
interval_s = 60
[incidents]
clean = 10
hold_s = 5.0
confirm_with = "python train.py"
"""


def _page(folder: Path) -> list[Path]:
    (folder / "key").write_text("0123456789abcdef0123456789ABCDEF")
    (folder / "page.toml").write_text(_PAGE)
    return [folder / "page.toml", folder / "page.toml", folder / "key"]


def _read_page(folder: Path) -> None:
    from proctor.verify.paging.config import exposed_secrets, read_config

    config = read_config(folder / "page.toml")
    config.open_sinks()
    exposed_secrets(config)


_PLAN: Final = r"""[mesh]
axes = ["dp", "pp", "tp"]
sizes = [2, 2, 2]
groups = { sp = "tp" }
[[param]]
path = 'layers\.\d+\.fc1\.(weight|bias)'
shard = { tp = 0 }
padded = true
[[param]]
path = '.*\.qkv\.weight'
shard = { tp = "interleaved:0:3" }
[[param]]
path = '.*'
replicate = true
[[activation]]
module = 'layers\.(\d+)'
slot = '|0|hidden_states'
output = { sp = 0, dp = 1 }
layout = "sbh->bsh"
[[rename]]
from = 'layers\.(\d+)\.(.*)'
to = 'layers.{g1 + 2*pp}.\2'
where = { pp = 1 }
"""
_NAMES: Final = [f"layers.{i}.{part}" for i in range(3) for part in ("fc1.weight", "fc1.bias", "qkv.weight", "attn.proj.weight")]


def _plan(folder: Path) -> list[Path]:
    (folder / "plan.toml").write_text(_PLAN)
    return [folder / "plan.toml"]


def _read_plan(folder: Path) -> None:
    from proctor.oracle.plans.names import compiled, renamed
    from proctor.oracle.plans.plan_toml import read_plan

    plan = read_plan(folder / "plan.toml")
    for name in (*_NAMES, "a" * 300, "1." * 100):
        for pattern in [rule.path for rule in plan.params] + [rule.module for rule in plan.activations]:
            compiled(pattern).fullmatch(name)
        for rule in plan.renames:
            renamed(name, rule.pattern, rule.to, {"pp": 1})


def _capsule(folder: Path) -> list[Path]:
    from proctor.invariants.capsule import (
        Batch,
        Blob,
        Call,
        Capsule,
        Generator,
        Print,
        Seen,
        Variable,
        folder_name,
        write_capsule,
    )

    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    made = Capsule(
        key="PR101 weights differ", step=7, world=1, program="train.py", command=("python", "train.py"), by_value=True, updates=1,
        batches=(Batch(3, (Seen("[0]", "float32", (2, 3), "cpu", Print(5, 0, 1.5), "weight"),)),),
        calls=(Call("module", "Net", (Seen("0", value=3),)),), generators=(Generator("torch", "rng"),),
        state=(Variable("parameter", "fc.weight", "float32", (2, 3), "cpu", Print(2**64 - 1, 0), Print(4, 0), "weight"),),
    )  # fmt: skip
    blobs = [Blob(k, "F32", a.shape, a.nbytes, lambda a=a: memoryview(a).cast("B")) for k, a in (("weight", weight), ("rng", weight))]
    write_capsule(folder / "run" / "capsules" / folder_name(made.key, made.step, 0), made, blobs)
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def _read_capsule(folder: Path) -> None:
    from proctor.invariants.capsule import capsules_of, read_capsule, siblings

    for path in capsules_of(folder / "run"):
        capsule = read_capsule(path)
        siblings(path, capsule)


def _recording(folder: Path) -> list[Path]:
    from safetensors.numpy import save_file

    from proctor.oracle.store import SCHEMA, ProcessInfo, RankWriter, RunInfo, write_json

    rng = np.random.default_rng(0)
    for run in ("clean", "again", "noise-0", "noise-1"):
        writer = RankWriter(folder / "recording" / "runs" / run / "rank0", save_file)
        for kind, name, shape in (("param", "fc.weight", (4, 3)), ("grad", "fc.weight", (4, 3)), ("output", "fc", (8, 4)), ("loss", "", ())):
            value = np.asarray(rng.standard_normal(shape), dtype=np.float32)
            fields = {"step": 0, "call": 0, "kind": kind, "name": name, "slot": "", "cls": "Linear", "source": "train.py:3"}
            writer.add(value, dtype="float32", size=value.nbytes, **fields)
        writer.close(ProcessInfo(rank=0, world=1, steps=1, done=True))
    write_json(folder / "recording" / "oracle.json", RunInfo(SCHEMA, ["python", "train.py"], "train.py", world=1, samples=2))
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def _read_recording(folder: Path) -> None:
    from proctor.oracle.judging.check import Comparison
    from proctor.oracle.store import Recording

    recording = Recording(folder / "recording")
    for run in recording.runs():
        for rank in recording.ranks(run).values():
            for entry in rank.entries:
                rank.array(entry)
    Comparison(Recording(folder.parent / "sound" / "recording"), recording).run()


def _import(folder: Path) -> list[Path]:
    log = traincheck.Log()
    log.call("torch.optim.adam.Adam.step")
    log.state("fc.weight")
    log.call("torch.optim.optimizer.Optimizer.zero_grad")
    traincheck.write(folder / "trace", log)
    (folder / "rules.json").write_text(
        msgspec.json.encode(traincheck.invariant("FunctionCoverRelation", traincheck.api("a.b"), traincheck.api("c.d"))).decode() + "\n"
    )
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def _read_import(folder: Path) -> None:
    from proctor.errors import ProctorError
    from proctor.infer.importers.traincheck.rules import import_rules
    from proctor.infer.importers.traincheck.run import import_run
    from proctor.invariants.trace import Trace

    out = folder.parent / "imported"
    wrong: ProctorError | None = None
    try:
        import_rules([folder / "rules.json"])
    except ProctorError as error:
        wrong = error
    import_run(folder / "trace", out, overwrite=True)
    Trace.load([out])
    if wrong is not None:
        raise wrong


def _frames(folder: Path) -> list[Path]:
    from proctor.invariants.wire import frames

    rows, sizes, body = frames.pack(encoded({table: batch(table, 4) for table in frames.ORDER}))
    said = [frames.Ping(), frames.Bye(), frames.Info({"rank": 0, "world": 1}), frames.Freeze("key", 3)]
    data = b"".join(frames.encode(one, channel=i, number=i) for i, one in enumerate(said))
    data += frames.encode(frames.Flush(0, 0, (0,) * 5, rows, sizes), number=9, body=body)
    (folder / "stream").write_bytes(data)
    return [folder / "stream"]


def _read_frames(folder: Path) -> None:
    from proctor.invariants.wire import frames

    decoder = frames.Decoder()
    for frame in decoder.feed((folder / "stream").read_bytes()):
        message = frame.message()
        if isinstance(message, frames.Flush):
            for rows in frames.unpack(message, frame.body).values():
                rows.validate(full=True)
    if decoder.pending:
        raise TransportError("the stream ends within a frame")


def _small(folder: Path) -> list[Path]:
    """What is small and read by commands: suppressions, baselines, the state of a verifier, the log of the live page."""
    from proctor.verify.lifecycle import IncidentBook
    from proctor.verify.view.events import CoverageEvent, EventLog, IncidentEvent

    (folder / "s.json").write_text('{"suppress": [{"rule": "abc", "reason": "known", "until": "2030-01-01", "program": "train.py"}]}')
    (folder / "s.toml").write_text('[[suppress]]\nrule = "abc"\nreason = "known"\nuntil = 2030-01-01\n')
    (folder / "b.json").write_text('{"schema": 1, "known": [{"rule": "a", "program": "b", "text": "c", "function": "d", "variable": "e"}]}')
    IncidentBook("job", "here", state_path=folder / "verify" / "incidents.json").coverage({"gap": 3})
    log = EventLog(folder)
    log.append(IncidentEvent(key="k", title="t", state="firing", details={"a": "b"}))
    log.append(CoverageEvent(lost={"gap": 4}))
    log.close()
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def _read_small(folder: Path) -> None:
    from proctor.errors import ProctorError
    from proctor.invariants.suppression import read_baseline, read_suppressions
    from proctor.verify.lifecycle import IncidentBook
    from proctor.verify.report.beside import read_beside
    from proctor.verify.view.feed import Feed

    wrong: ProctorError | None = None
    for read in (
        lambda: read_suppressions(folder / "s.json"),
        lambda: read_suppressions(folder / "s.toml"),
        lambda: read_baseline(folder / "b.json"),
        lambda: IncidentBook("job", "here", state_path=folder / "verify" / "incidents.json"),
    ):
        try:
            read()
        except ProctorError as error:
            wrong = error
    read_beside(folder)
    feed = Feed(folder)
    feed.poll()
    feed.join(None)
    feed.close()
    if wrong is not None:
        raise wrong


READERS: Final = [
    Reader("pack", _pack, _read_pack),
    Reader("page", _page, _read_page),
    Reader("trace", _run, _read_run),
    Reader("capsule", _capsule, _read_capsule),
    Reader("plan", _plan, _read_plan),
    Reader("recording", _recording, _read_recording),
    Reader("import", _import, _read_import),
    Reader("frames", _frames, _read_frames),
    Reader("small", _small, _read_small),
]
