"""Is the oracle quiet on correct programs, and does it see mistakes? Every mesh that four ranks allow, options, types, seeds.

    python benchmarks/oracle_sweep.py OUT [clean|mistakes] [--resume] [--only SUBSTRING] [--seeds 0,1,2] [--extra N] [--jobs N] [--minutes M]

Programs: `examples/oracle/` in float32 and bfloat16, and with `--minimegatron DIR` (default ../shared/bugs/_minimegatron,
left out when absent) a small Megatron: tp × cp × dp × pp × sequence parallel × ZeRO-1 × recomputation × experts ×
microbatches × fp8 × loss per token. One reference for each set of options that changes the numbers. `clean` wants
`equivalent`; everything else is a false alarm and is printed with its tensor. `mistakes` makes those of
`examples/oracle/injected.py` and wants `different`, named by what the mistake accepts. A line of JSON a run goes to
OUT/results.jsonl; `--resume` goes on from there.
"""

# More than 400 lines: the meshes, options and mistakes of one sweep, which reports quote by this path.
from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from oracle_warm import Warm, WarmRecorder

from proctor.errors import ProctorError
from proctor.oracle.judging.check import Comparison
from proctor.oracle.judging.verdicts import Verdict, failing
from proctor.oracle.store import Recording
from tests.helpers.oracle.oracle_programs import CONFIGURATIONS, FOLDER, Configuration

ROOT = Path(__file__).resolve().parent.parent
MINI = ROOT.parent / "shared" / "bugs" / "_minimegatron"
MINI_SCRIPT = '''"""One run of the small Megatron: `mini.py ref|par KEY=VALUE …`."""
import sys
from argparse import Namespace

sys.path.insert(0, {folder!r})
from minimegatron.config import ModelConfig
from minimegatron.reference import train_reference
from minimegatron.training import launch, train

given = dict(a.split("=") for a in sys.argv[2:])
args = Namespace(iters=2, seed=int(given.pop("data_seed", 0)), save="")
kinds = {{k: type(getattr(ModelConfig, k)) for k in given}}
cfg = ModelConfig(**{{k: v == "1" if kinds[k] is bool else kinds[k](v) for k, v in given.items()}})
if __name__ == "__main__":
    if sys.argv[1] == "ref":
        train_reference(cfg, args)
    else:
        launch(train, cfg, args)
'''
LAYOUT_ONLY = ("tp", "cp", "pp", "sequence_parallel", "distributed_optimizer", "overlap_param_gather", "tp_comm_overlap",
               "recompute", "recompute_num_layers", "bucket_numel")  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A correct program beside its reference.

    Attributes:
        name: unique.
        candidate, reference: script and arguments.
        world: ranks of the candidate.
        configuration: of examples/oracle, whose mistakes may be made.
    """

    name: str
    candidate: tuple[str, ...]
    reference: tuple[str, ...]
    world: int
    configuration: Configuration | None = field(default=None, compare=False)


@dataclass
class Row:
    """What one run gave.

    Attributes:
        worst: largest ratio of error to tolerance among tensors that were judged and are not wrong.
        wrong: tensors that are, the first in the dataflow first.
    """

    name: str
    mistake: str
    verdict: str
    reason: str = ""
    first: str = ""
    named: bool = False
    named_by: str = ""
    worst: float = 0.0
    worst_at: str = ""
    margin: float = 0.0
    checked: int = 0
    blind: int = 0
    unmapped: int = 0
    wrong: list[str] = field(default_factory=list)
    replicas: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unchecked: int = 0
    seconds: float = 0.0


def example_cases(seeds: Sequence[int], dtypes: Sequence[str]) -> Iterator[Case]:
    """The programs of examples/oracle."""
    for seed, dtype, c in itertools.product(seeds, dtypes, CONFIGURATIONS):
        if c.program == "llama_tp" and not _has("transformers"):
            continue
        more = ("--seed", str(seed), "--dtype", dtype)
        script = str(FOLDER / f"{c.program}.py")
        yield Case(
            f"{c} {' '.join(more)}", (script, *c.arguments, *more), (script, *c.shared, *more), _world(c),
            replace(c, shared=(*c.shared, *more)),
        )  # fmt: skip


def mini_cases(script: Path, seeds: Sequence[int], extra: int) -> Iterator[Case]:
    """The small Megatron: each mesh alone, with each option, and with `extra` random sets of options."""
    rng = random.Random(0)
    meshes = [m for m in itertools.product((1, 2, 3, 4), repeat=4) if 1 < m[0] * m[1] * m[2] * m[3] <= 4 and 3 not in m]
    for seed in seeds:
        chosen: dict[str, Case] = {}
        for tp, cp, dp, pp in meshes:
            mesh = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
            for options in (*_single(mesh), *(_random(mesh, rng) for _ in range(extra))):
                given = {k: v for k, v in mesh.items() if v > 1} | options
                if pp > 2:
                    given["layers"] = 5
                if seed:
                    given |= {"seed": 1234 + seed, "data_seed": seed}
                words = [f"{k}={v}" for k, v in given.items()]
                shared = [w for w in words if w.split("=")[0] not in LAYOUT_ONLY]
                name = "mini " + " ".join(words)
                chosen[name] = Case(name, (str(script), "par", *words), (str(script), "ref", *shared), tp * cp * dp * pp)
        yield from chosen.values()


def _single(mesh: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    yield {}
    yield from (
        {"microbatches": 2}, {"recompute": "uniform"}, {"num_experts": 2}, {"fp8": 1}, {"per_token_loss": 1},
        {"distributed_optimizer": 1}, {"distributed_optimizer": 1, "overlap_param_gather": 1}, {"optimizer": "sgd"},
    )  # fmt: skip
    if mesh["tp"] > 1:
        yield {"sequence_parallel": 1}
        yield {"sequence_parallel": 1, "tp_comm_overlap": 1}


def _random(mesh: Mapping[str, int], rng: random.Random) -> dict[str, Any]:
    """Options that go together."""
    found: dict[str, Any] = {}
    if mesh["tp"] > 1 and rng.random() < 0.6:
        found["sequence_parallel"] = 1
        if rng.random() < 0.3:
            found["tp_comm_overlap"] = 1
    if rng.random() < 0.5:
        found["distributed_optimizer"] = 1
        found["bucket_numel"] = rng.choice((1000, 4000, 100000))
        if rng.random() < 0.5:
            found["overlap_param_gather"] = 1
    if rng.random() < 0.4:
        found["recompute"] = rng.choice(("uniform", "block"))
        if rng.random() < 0.5:
            found["recompute_num_layers"] = 2
    for option, value, share in (("num_experts", 4, 0.3), ("fp8", 1, 0.25), ("per_token_loss", 1, 0.3)):
        if rng.random() < share:
            found[option] = value
    if rng.random() < 0.4:
        found["microbatches"] = rng.choice((2, 4)) if mesh["dp"] < 4 else 2
    if rng.random() < 0.3:
        found["layers"] = rng.choice((3, 4))
    return found


def _has(library: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(library) is not None


def _world(c: Configuration) -> int:
    own = dict(itertools.pairwise(c.own))
    if "--nprocs" in own:
        return int(own["--nprocs"])
    world = 1
    for part in own["--mesh"].split(","):
        world *= int(part.split("=")[1])
    return world


class Sweep:
    """Runs cases, keeps references, and writes rows.

    Args:
        out: directory.
        warm: processes that run the programs.
    """

    def __init__(self, out: Path, warm: Warm) -> None:
        self.out, self.warm = out, warm
        (out / "references").mkdir(parents=True, exist_ok=True)

    def reference(self, arguments: Sequence[str]) -> Recording:
        key = hashlib.sha256(" ".join(arguments).encode()).hexdigest()[:12]
        folder = self.out / "references" / key
        if not (folder / "complete").exists():
            WarmRecorder(self.warm, 1, folder, arguments, samples=4).record()
            (folder / "complete").touch()
        return Recording(folder)

    def judge(self, case: Case, mistake: str = "", *, localise: bool = False) -> Row:
        """Record a candidate and compare it."""
        began = time.monotonic()
        name = hashlib.sha256(f"{case.name} {mistake}".encode()).hexdigest()[:12]
        folder = self.out / "candidates" / name
        row = Row(case.name, mistake, "failed")
        try:
            reference = self.reference(case.reference)
            more = ("--bug", mistake) if mistake else ()
            WarmRecorder(self.warm, case.world, folder, (*case.candidate, *more), samples=0).record()
            candidate = Recording(folder)
            comparison = Comparison(reference, candidate)
            found = comparison.run()
            _fill(row, found)
            if mistake and case.configuration is not None:
                patterns = case.configuration.blamed(mistake)
                if localise and found.verdict == "different" and not _named(found, patterns):
                    found = self._localised(comparison, case, found)
                row.named_by = _named(found, patterns)
                row.named = bool(row.named_by)
        except (ProctorError, OSError, ValueError, KeyError, IndexError, AssertionError, TypeError) as e:
            row.reason = f"{type(e).__name__}: {e}"[:400]
        row.seconds = round(time.monotonic() - began, 2)
        if row.verdict != ("different" if mistake else "equivalent"):
            kept = self.out / "kept" / name
            shutil.rmtree(kept, ignore_errors=True)
            if folder.exists():
                kept.parent.mkdir(exist_ok=True)
                shutil.move(folder, kept)
        shutil.rmtree(folder, ignore_errors=True)
        return row

    def _localised(self, comparison: Comparison, case: Case, found: Verdict) -> Verdict:
        import proctor.oracle.localising.localise as module
        from proctor.oracle.report import Report

        warm, world = self.warm, case.world

        class Again(WarmRecorder):
            @classmethod
            def again(cls, recording: Recording, command: Sequence[str], **more: Any) -> Any:
                made = super().again(recording, command, **more)
                made.warm, made.ranks = warm, world
                return made

        module.Recorder = Again  # type: ignore[misc]
        return module.localise(Report(found), comparison, comparison.candidate.info.command).verdict


def _named(found: Verdict, patterns: Sequence[str]) -> str:
    """By what the report names one of the accepted tensors or modules; "" when it does not."""
    said: list[tuple[str, str]] = []
    if found.first is not None:
        said.append(("first", found.first.name))
    if found.culprit is not None:
        said.append(("culprit", found.culprit.module))
    said += [("replica", r.name) for r in found.replicas[:1]]
    return next((by for by, name in said for p in patterns if re.fullmatch(p, name)), "")


def _fill(row: Row, found: Verdict) -> None:
    judged = [t for t in found.tensors if t.verdict in ("ok", "warn")]
    worst = max(judged, key=lambda t: t.ratio, default=None)
    row.verdict, row.reason, row.checked = found.verdict, found.reason, found.checked
    row.notes, row.unchecked = list(found.notes), len(found.unchecked)
    row.blind = sum(t.verdict == "no-power" for t in found.tensors)
    row.unmapped = sum(t.verdict == "unmapped" for t in found.tensors)
    if worst is not None:
        row.worst, row.worst_at = worst.ratio, f"{worst.kind} {worst.name} {worst.slot}".strip()
    if found.first is not None:
        row.first, row.margin = f"{found.first.kind} {found.first.name}", found.first.ratio
    wrong = [t for t in found.tensors if failing(t)]
    row.wrong = [f"{t.verdict} {t.kind} {t.name} {t.slot} ×{t.ratio:.3g} rel {t.rel_err:.2g} [{t.layout}] {t.note}" for t in wrong[:8]]
    row.replicas = [f"{r.kind} {r.name} along {r.axis} ×{r.ratio:.3g}" for r in found.replicas[:6]]


def mistakes(cases: Sequence[Case], each: int) -> list[tuple[Case, str]]:
    """Every mistake on some of the configurations where it fits, those that can only be seen in float32 there alone."""
    sys.path.insert(0, str(FOLDER))
    import injected

    rng = random.Random(1)
    fitting: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        if case.configuration is None or case.configuration.program == "llama_tp":
            continue
        for name in case.configuration.mistakes():
            if not (injected.MISTAKES[name].float32_only and "bfloat16" in case.name):
                fitting[name].append(case)
    return [(case, name) for name, some in sorted(fitting.items()) for case in rng.sample(some, min(each, len(some)))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("what", choices=("clean", "mistakes", "list"), nargs="?", default="clean")
    parser.add_argument("--minimegatron", type=Path, default=MINI)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--again", action="store_true", help="with --resume: run those that failed once more")
    parser.add_argument("--only", default="", help="regular expression on names")
    parser.add_argument("--seeds", default="0", help="comma-separated")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="comma-separated")
    parser.add_argument("--extra", type=int, default=4, help="random sets of options for each mesh of the small Megatron")
    parser.add_argument("--each", type=int, default=3, help="configurations for each mistake")
    parser.add_argument("--localise", action="store_true", help="mistakes: look for the culprit where the first tensor does not name it")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so long")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    seeds = [int(s) for s in args.seeds.split(",")]
    examples = list(example_cases(seeds, args.dtypes.split(",")))
    small: list[Case] = []
    if args.minimegatron.is_dir():
        script = args.out.resolve() / "mini.py"
        script.write_text(MINI_SCRIPT.format(folder=str(args.minimegatron)))
        small = list(mini_cases(script, seeds, args.extra))
    elif args.what == "clean":
        print(f"{args.minimegatron} is not there: the small Megatron is left out", file=sys.stderr)
    jobs: list[tuple[Case, str]]
    jobs = mistakes(examples, args.each) if args.what == "mistakes" else [(c, "") for c in _mixed(examples, small)]
    jobs = [(c, m) for c, m in jobs if re.search(args.only, f"{m} {c.name}")]
    if args.what == "list":
        print(*(f"{c.name}" for c, _ in jobs), sep="\n")
        print(len(jobs))
        return 0
    path = args.out / f"{args.what}.jsonl"
    rows = [Row(**json.loads(line)) for line in path.read_text().splitlines()] if args.resume and path.exists() else []
    wanted = "different" if args.what == "mistakes" else "equivalent"
    if args.again:
        rows = [r for r in rows if r.verdict == wanted]
    done = {(r.name, r.mistake) for r in rows}
    path.write_text("".join(json.dumps(asdict(r)) + "\n" for r in rows))
    until = time.monotonic() + 60 * args.minutes
    by_reference: dict[tuple[str, ...], list[tuple[Case, str]]] = defaultdict(list)
    for case, name in jobs:
        if (case.name, name) not in done:
            by_reference[case.reference].append((case, name))
    warm = Warm(args.jobs)
    sweep = Sweep(args.out, warm)

    def group(some: Sequence[tuple[Case, str]]) -> None:
        for case, name in some:
            if time.monotonic() > until:
                return
            row = sweep.judge(case, name, localise=args.localise)
            rows.append(row)
            with open(path, "a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
            if row.verdict != wanted:
                print(f"{'MISSED' if name else 'FALSE'} {name} {row.name}: {row.verdict}: {row.reason}", flush=True)
                for text in (*row.wrong[:4], *row.replicas[:3]):
                    print(f"      {text}", flush=True)

    try:
        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(group, by_reference.values()))
    finally:
        warm.close()
    report(rows, args.what)
    return 0 if all(r.verdict == wanted for r in rows) else 1


def _mixed(a: Sequence[Case], b: Sequence[Case]) -> list[Case]:
    """In turn, so that a sweep that is stopped has seen some of everything."""
    pairs = itertools.zip_longest(random.Random(2).sample(a, len(a)), random.Random(3).sample(b, len(b)))
    return [c for pair in pairs for c in pair if c is not None]


def report(rows: Sequence[Row], what: str) -> None:
    """A table of the whole."""
    if what == "mistakes":
        print(f"{'mistake':28} {'runs':>4} {'found':>5} {'named':>5}  smallest ratio of the first tensor")
        for name in sorted({r.mistake for r in rows}):
            mine = [r for r in rows if r.mistake == name]
            found = [r for r in mine if r.verdict == "different"]
            least = min((r.margin for r in found if r.first), default=float("inf"))
            print(f"{name:28} {len(mine):4} {len(found):5} {sum(r.named for r in mine):5}  {least:.3g}")
        print(f"{sum(r.verdict == 'different' for r in rows)}/{len(rows)} found, {sum(r.named for r in rows)} named")
        return
    kinds = Counter((_kind(r.name), r.verdict) for r in rows)
    for kind in sorted({k for k, _ in kinds}):
        mine = [r for r in rows if _kind(r.name) == kind]
        worst = max(mine, key=lambda r: r.worst)
        print(
            f"{kind:24} {len(mine):5} runs  "
            + "  ".join(f"{v} {kinds[kind, v]}" for v in ("equivalent", "different", "inconclusive", "failed") if kinds[kind, v])
            + f"  tensors {sum(r.checked for r in mine):,}  worst {worst.worst:.2f} ({worst.worst_at}: {worst.name})"
        )


def _kind(name: str) -> str:
    return name.split()[0] + (" bfloat16" if "bfloat16" in name else " float32")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        sys.exit(main())
    except subprocess.SubprocessError as e:
        sys.exit(str(e))
