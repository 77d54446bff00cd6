"""Healthy public programs through the oracle: what it says of a program and itself, and of one and two ranks of it.

    python -m benchmarks.wild_oracle WILD [--half first|second] [--only TEXT] [--number N] [--ranks 2] [--write]
    python -m benchmarks.wild_oracle WILD --table [--also FOLDER] [--write]

WILD is a folder of checkouts as of `benchmarks.wild`, whose manifests, shims and data are used. The reference is recorded as `proctor oracle run` does it,
with its four noise samples, the candidate is the same program once more; both are forks of a process that has imported torch. So every `different` is a
false alarm. With `--ranks 2` the candidate runs on two gloo ranks, with half of the batch each, where the script can (`TWO_RANKS`): there a `different`
may be true, as of batch norm that sees half of a batch, and the text says which. `inconclusive` is counted by its reason. Results
lie in WILD/results/COMMIT-oracle, one JSON a program and number of ranks, and are not made again. Of the second half only figures are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.forks import Forks
from benchmarks.wild.__main__ import chosen, product
from benchmarks.wild.attempt import FIXED, MEMORY_BYTES, importable, lay_out
from benchmarks.wild.manifest import SHIMS, Program, read_corpus
from benchmarks.wild.table import grid, write_section
from proctor.errors import ProctorError
from proctor.oracle.collect.config import CollectConfig
from proctor.oracle.recording.outcome import Compared, compare_recordings, record_and_compare
from proctor.oracle.recording.record import Recorder
from proctor.oracle.recording.running import LOG
from proctor.oracle.store import Recording

ROOT: Final = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- wild oracle -->", "<!-- /wild oracle -->"
TWO_RANKS: Final = ("sentence_transformer-training", "peft_no_lora_accelerate", "pytorch-image-models--train")  # they read torchrun's variables without an argument
_ONE: Final = threading.Lock()
HALVES: Final = {"first": "looked at", "second": "held"}
UPDATES: Final = 6  # after which a program ends: one step is recorded, and some have several optimizers
STATES: Final = ("equivalent", "different", "inconclusive", "not recorded")


class Found(msgspec.Struct, kw_only=True):
    """What came out of one program.

    Args:
        ranks: of the candidate.
        state: a verdict, `not recorded` (see `why`), or `does not run`: neither does it without Proctor.
        why: the verdict's reason, or the error.
        checked: tensors that were compared.
    """

    name: str
    project: str
    half: str
    ranks: int
    state: str
    why: str = ""
    checked: int = 0
    seconds: float = 0


class WarmRecorder(Recorder):
    """Records a program of the corpus in forks.

    Args:
        forks: where it runs.
        home: folder in which a copy of it is laid out for each run.
        checkout: of its project.
        ranks: that it runs on.
    """

    def __init__(self, forks: Forks, program: Program, checkout: Path, home: Path, ranks: int, out: Path, **more: Any) -> None:
        super().__init__(out, [sys.executable, program.path, *program.arguments], overwrite=True, **more)
        self.forks, self.program, self.checkout, self.home, self.ranks = forks, program, checkout, home, ranks

    def _run(self, config: CollectConfig, folder: Path) -> int | None:
        with _ONE:  # noise samples are asked for from several threads
            return self._alone(config, folder)

    def _alone(self, config: CollectConfig, folder: Path) -> int | None:
        activation = folder / "activation.json"
        activation.write_bytes(msgspec.json.encode(config))
        return run(self.forks, self.program, self.checkout, self.home, folder / LOG, self.ranks, activation)


def run(forks: Forks, program: Program, checkout: Path, home: Path, log: Path, ranks: int = 1, collect: Path | None = None) -> int:
    """The exit code of a copy of a program that is laid out anew; each of several ranks gets its part of the batch."""
    shutil.rmtree(home, ignore_errors=True)
    place, installed, script = lay_out(program, checkout, home)
    environment = {"WILD_SHIMS": ",".join(program.shims), "WILD_STEPS": str(min(program.steps, UPDATES)), "WILD_BATCH": str(program.batch // ranks), "HOME": str(home)}
    path = [str(SHIMS), str(installed)]
    return forks.run(script, program.arguments, place, log, environment, ranks=ranks, path=path, collect=collect, timeout_s=program.timeout_s)


def judge(program: Program, checkout: Path, work: Path, forks: Forks, ranks: int) -> Compared:
    """Record a program and itself, and compare; runs one after the other, as their folder is the same."""

    def record(seed: int | None) -> tuple[Recording, Recording]:
        made = []
        for out, samples, count in ((work / "reference", 4, 1), (work / "candidate", 0, ranks)):
            common = {"samples": samples, "eager": True, "timeout_s": program.timeout_s, "options": {"generate": seed}}
            WarmRecorder(forks, program, checkout, work / "home", count, out, reference=samples > 0, **common).record()
            made.append(Recording(out))
        return made[0], made[1]

    return record_and_compare(record, lambda reference, candidate: compare_recordings(reference, candidate, None), None)


def attempt(program: Program, checkout: Path, work: Path, forks: Forks, ranks: int) -> Found:
    """What the oracle says of one program."""
    began = time.monotonic()
    said = Found(name=program.name, project=program.project, half=program.half, ranks=ranks, state="not recorded")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    if code := run(forks, program, checkout, work / "home", work / "bare.log"):
        said.state, said.why = "does not run", f"exit {code} without Proctor"
        return said
    try:
        verdict = judge(program, checkout, work, forks, ranks).report.verdict
        said.state, said.why, said.checked = verdict.verdict, verdict.reason, verdict.checked
        if verdict.verdict == "different" and verdict.first is not None:
            said.why += f"; first {verdict.first.name} ({verdict.first.kind}, step {verdict.first.step})"
    except (ProctorError, OSError, RuntimeError) as error:
        said.why = f"{type(error).__name__}: {error}"
    said.seconds = round(time.monotonic() - began, 1)
    if said.state == "equivalent":
        shutil.rmtree(work, ignore_errors=True)
    return said


def selected(half: str, only: str, wild: Path, ranks: int) -> list[Program]:
    """Programs that can run here on one rank, of all projects in turn."""
    programs = [p for p in chosen(read_corpus(), half, only) if not p.skip and (wild / p.project / p.path).is_file() and all(importable(n) for n in p.needs)]
    if ranks > 1:
        programs = [p for p in programs if any(name in p.name for name in TWO_RANKS) and p.launcher == "python" and p.batch % ranks == 0]
    return [p for p in programs if p.launcher == "python"]


def table(everything: Sequence[Found]) -> str:
    """Markdown: a line for each half and number of ranks, and why nothing could be said; of programs that run here without Proctor."""
    lines, found = [], [f for f in everything if f.state != "does not run"]
    for half, ranks in sorted({(f.half, f.ranks) for f in found}):
        these = [f for f in found if (f.half, f.ranks) == (half, ranks)]
        count = Counter(f.state for f in these)
        lines.append((HALVES[half], f"1 and {ranks}", len(these), len({f.project for f in these}), *(count[s] for s in STATES), sum(f.checked for f in these)))
    told = grid(("half", "ranks", "programs", "projects", *STATES, "tensors compared"), lines)
    reasons = Counter(reason_of(f) for f in found if f.state in ("inconclusive", "not recorded"))
    told += [*grid(("nothing is said because", "programs"), sorted(reasons.items(), key=lambda item: -item[1]))] if reasons else []
    return "\n".join(told).rstrip() + "\n"


def reason_of(found: Found) -> str:
    """Why nothing is said, without what is the program's own: numbers and names."""
    text = (found.why.strip().splitlines() or ["?"])[0]
    text = text.partition(": ")[2] if found.state == "not recorded" and text.startswith(("OracleError", "UsageError")) else text
    text = text.removeprefix(f"{found.name}: ").split(":")
    return f"{found.state}: {' '.join(text[-1 if found.state == 'not recorded' and len(text) > 1 else 0].split())[:80]}"


def read(folders: Sequence[Path]) -> list[Found]:
    """What was made before, and is whole; of each program that of the first folder that has it."""
    found: dict[str, Found] = {}
    for path in (path for folder in folders for path in sorted(folder.glob("*.json"))):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            found.setdefault(path.name, msgspec.json.decode(path.read_bytes(), type=Found))
    return list(found.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wild", type=Path, help="folder of checkouts")
    parser.add_argument("--half", choices=("first", "second"), default="")
    parser.add_argument("--only", default="", help="programs whose name holds this")
    parser.add_argument("--number", type=int, default=0, help="at most so many programs")
    parser.add_argument("--ranks", type=int, default=1, help="of the candidate")
    parser.add_argument("--table", action="store_true", help="only the table of what was run")
    parser.add_argument("--also", type=Path, action="append", default=[], help="folder of results of another commit, for programs that have none of this one")
    parser.add_argument("--write", action="store_true", help="write the section of docs/evaluation.md")
    args = parser.parse_args()
    if not args.wild.is_dir():
        print(f"{args.wild}: no such folder of checkouts; make an empty one and name it", file=sys.stderr)
        return 2
    if args.ranks < 1:
        print("--ranks must be at least 1", file=sys.stderr)
        return 2
    wild = args.wild.resolve()
    folder = wild / "results" / f"{product()}-oracle"
    folder.mkdir(parents=True, exist_ok=True)
    if not args.table:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PROCTOR_", "WILD_"))} | FIXED | {"TORCHDYNAMO_DISABLE": "1"}
        forks = Forks(SHIMS / "sitecustomize.py", clean, timeout_s=900, memory_mib=MEMORY_BYTES >> 20)
        for program in selected(args.half, args.only, wild, args.ranks)[: args.number or None]:
            kept = folder / f"{program.name}-{args.ranks}.json"
            if any((place / kept.name).exists() for place in (folder, *args.also)):
                continue
            found = attempt(program, wild / program.project, folder / "work" / f"{program.name}-{args.ranks}", forks, args.ranks)
            kept.write_bytes(msgspec.json.encode(found))
            why = "" if found.state == "equivalent" or (found.half == "second" and found.state not in ("not recorded", "does not run")) else f": {found.why}"
            print(f"{found.name}: {found.state}, {found.checked} tensors, {found.seconds} s{why}", flush=True)
        forks.close()
    told = table(read([folder, *args.also]))
    print(told)
    if args.write:
        write_section(ROOT / "docs" / "evaluation.md", told, (BEGIN, END))
    return 0


if __name__ == "__main__":
    sys.exit(main())
