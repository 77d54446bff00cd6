"""Every mistake of `examples/oracle/injected.py` that changes the mathematics, refuted by `prove`, and the module that it names.

    python benchmarks/prove_mistakes.py [--only NAME …] [--program parallel_gpt|pipeline_gpt|switch_moe] [--out FILE]

A row: mistake, configuration, verdict, whether the culprit's module (or, without one, the first wrong output) matches what `injected.py`
says a good checker blames, seconds of CPU. Programs of DTensor and DDP are called as functions on a fake process group; pipelines and
experts, which exchange numbers that they decide by, as commands with real ranks.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import warnings
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "oracle"
sys.path.insert(0, str(EXAMPLES))

SMALL = "--width 16 --heads 4 --vocab 16 --context 8 --rows 4 --steps 1".split()
CONFIGURATIONS = {
    "parallel_gpt": ["--mesh tp=2", "--mesh dp=2", "--mesh tp=2 --sp", "--mesh dp=2 --fsdp", "--mesh dp=2 --microbatches 2", "--mesh tp=2 --tied", "--mesh dp=2 --zero", "--mesh tp=2 --recompute"],
    "pipeline_gpt": ["--nprocs 2 --layers 4 --microbatches 2", "--nprocs 2 --layers 4 --microbatches 2 --tied", *(f"--nprocs 2 --layers 4 --microbatches 4 --width 8 --context 4 --schedule {name}" for name in ("gpipe", "1f1b", "interleaved"))],
    "switch_moe": ["--nprocs 2", "--nprocs 2 --microbatches 2"],
}
DROPS = {"dropout_probability", "dropout_missing", "masks_of_each_rank", "masks_not_restored"}  # of chance, not of formulas


def alone(options: list[str]) -> list[str]:
    """The reference's arguments."""
    keep, skip = [], False
    for word in options:
        if skip or word in ("--sp", "--fsdp", "--zero"):
            skip = False
        elif word in ("--mesh", "--nprocs"):
            skip = True
        else:
            keep.append(word)
    return keep


def parallel(options: list[str], bug: str | None) -> Any:
    """A function that trains one step of `parallel_gpt.py`."""
    import gpt
    import parallel_gpt
    import torch.distributed as dist

    def train() -> None:
        args = parallel_gpt.arguments([*options, *(["--bug", bug] if bug else [])])
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        job = parallel_gpt.Job(rank, world, args)
        job.make_parallel()
        for batch in gpt.batches(args):
            job.step(batch)

    return train


def judge(program: str, options: list[str], bug: str | None, proof_s: float = 0.0) -> Any:
    """The verdict on one configuration."""
    from proctor.oracle.prove.command import tapes_of
    from proctor.oracle.prove.prover import decide
    from proctor.oracle.prove.recording.world import tape_of

    options = [*SMALL, *options]
    if program == "parallel_gpt":
        import parallel_gpt

        mesh = parallel_gpt.arguments(options).mesh
        world = mesh["dp"] * mesh["tp"]
        reference = tape_of(parallel(alone(options), None))
        return decide(reference, [tape_of(parallel(options, bug), r, world) for r in range(world)], proof_s=proof_s)
    command = [sys.executable, str(EXAMPLES / f"{program}.py")]
    reference = tapes_of([*command, *alone(options)], timeout_s=900)[0]
    return decide(reference, tapes_of([*command, *options, *(["--bug", bug] if bug else [])], timeout_s=900), proof_s=proof_s)


def cases(program: str) -> list[tuple[str, str]]:
    """Each mistake with the first configuration that it fits."""
    import importlib

    import injected

    module, found = importlib.import_module(program), []
    for bug in injected.names(program):
        for options in CONFIGURATIONS[program]:
            if bug not in DROPS and injected.fits(bug, module.arguments([*SMALL, *options.split()])):
                found.append((bug, options))
                break
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--program", choices=CONFIGURATIONS)
    parser.add_argument("--correct", action="store_true", help="the configurations without a mistake, with a proof")
    parser.add_argument("--proof", type=float, default=120.0, metavar="S", help="with --correct: seconds for each proof")
    parser.add_argument("--out")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for program in [args.program] if args.program else CONFIGURATIONS:
        todo = [("", options) for options in CONFIGURATIONS[program]] if args.correct else cases(program)
        for bug, options in todo:
            if args.only and bug not in args.only:
                continue
            rows.append(one(program, bug, options, args.proof))
            print(json.dumps(rows[-1]), flush=True)
    if args.out:
        Path(args.out).write_text(json.dumps(rows, indent=1))
    right = sum(row["right"] for row in rows)
    print(f"{sum(row['verdict'] == 'DIFFERENT' for row in rows)} of {len(rows)} DIFFERENT, module right in {right}")


def one(program: str, bug: str, options: str, proof_s: float) -> dict[str, Any]:
    """A row."""
    import importlib

    import injected

    began = time.process_time()
    try:
        verdict = judge(program, options.split(), bug or None, proof_s if not bug else 0.0)
    except Exception as error:  # noqa: BLE001 - a row of the table, too
        return {"program": program, "bug": bug, "options": options, "verdict": "error", "right": False, "said": f"{type(error).__name__}: {str(error)[:200]}"}
    row = {"program": program, "bug": bug, "options": options, "verdict": verdict.verdict, "right": False, "cpu_s": round(time.process_time() - began, 1)}
    if not bug:
        return {**row, "why": verdict.why, "opaque": verdict.opaque}
    names = injected.blamed(bug, importlib.import_module(program).arguments([*SMALL, *options.split()]))
    module, parameter = (verdict.culprit.module, verdict.culprit.parameter) if verdict.culprit else ("", "")
    blamed = parameter or module or (verdict.wrong[0].split(" ")[1] if verdict.wrong else "")
    row["right"] = verdict.verdict == "DIFFERENT" and any(re.fullmatch(name, blamed) for name in names)
    row |= {"blamed": blamed, "kind": verdict.culprit.kind if verdict.culprit else "", "said": verdict.culprit.said[:160] if verdict.culprit else verdict.why[:160]}
    return row


if __name__ == "__main__":
    main()
