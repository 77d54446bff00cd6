"""Record the first step of a command, unchanged, for a comparison.

Every module's inputs and outputs, their gradients, parameters before and after the step and the gradients that the
optimizer took are kept under DIR. A job of one rank can be a reference, so it is run again: once to see whether it is
deterministic and four times with noise, from which the tolerance of every tensor follows. The command is stopped once
every rank has recorded what is needed. What `torch.compile` wraps runs compiled and is recorded at its edges; as a reference
it runs without.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proctor.cli._parts.launch import add_command, command_of
from proctor.errors import UsageError

if TYPE_CHECKING:
    from proctor.oracle.store import RunInfo

EVALUATIONS, FORWARDS = 4, 16  # forwards without gradients that are recorded by default, beside training and alone


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("-o", "--output", metavar="DIR", required=True, help="directory to make")
    add_recording(parser)
    parser.add_argument(
        "--whole", metavar="STEP", type=int, default=0,
        help="of several steps: the one, from 0, of which all tensors are kept beside the first; of the others parameters, gradients and buffers"
    )
    parser.add_argument(
        "--as-reference", action="store_true", help="record noise samples although it has several ranks (a pipeline that is trusted)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier recording in DIR")
    add_command(parser)


def add_recording(parser: argparse.ArgumentParser, dropout: Sequence[str] = ("keep", "draw")) -> None:
    """Declare how commands are recorded."""
    parser.add_argument("--plan", metavar="PLAN", help="how parameters and activations are cut (TOML); found by content without one")
    parser.add_argument("--steps", metavar="K", type=int, default=1, help="optimizer steps to record (default 1)")
    parser.add_argument(
        "--evaluations", metavar="N", type=int, help="forwards without gradients to record in each step, which are compared apart from training (default 4, with --forward 16; 0: none)"
    )
    parser.add_argument(
        "--forward", action="store_true",
        help="nothing is trained, as in an engine that generates: compare forwards, and the weights at the start and after each of K - 1 changes of them (--steps K)",
    )
    parser.add_argument(
        "--statistics", action="store_true",
        help="for models whose tensors are too many to keep: of each only sums over tiles, norm, mean and extremes; the report says what they cannot see",
    )
    parser.add_argument("--until-evaluation", action="store_true", help="where the recorded steps have none, run on until the first evaluation and compare that too")
    parser.add_argument("--samples", metavar="N", type=int, default=4, help="runs with noise of a job of one rank (default 4)")
    parser.add_argument(
        "--generate", metavar="SEED", type=int, nargs="?", const=0, help="generate parameters by name instead of taking the program's own"
    )
    parser.add_argument("--eager", action="store_true", help="run what torch.compile wraps uncompiled, so that its inside is compared")
    parser.add_argument(
        "--dropout", choices=dropout, default="keep",
        help="keep: it keeps everything in the recorded steps, and its probabilities are compared (default); draw: leave it alone"
        + ("; replay: the candidate gets the reference's masks" if "replay" in dropout else ""),
    )
    parser.add_argument(
        "--rng", choices=("keyed", "stock"), dest="dropout", default=argparse.SUPPRESS, help="nothing is switched off: every rank draws its part of what one device draws (with ranks: [[draw]] of --plan says which); keyed: by names, in any order; stock: what the program draws on one device, call by call"
    )
    parser.add_argument("--keep-inputs", action="store_true", help="use the program's own data (the default; accepted for scripts)")
    parser.add_argument("--to-the-end", action="store_true", help="let the command finish instead of stopping it")
    parser.add_argument("--timeout", metavar="S", type=float, default=3600.0, help="end a command that takes longer (default 3600)")


def run(args: argparse.Namespace) -> int:
    """Record; the exit code is 0 unless something is wrong."""
    if not 0 <= args.whole < max(1, args.steps):
        raise UsageError("--whole STEP counts from 0 and is below --steps")
    _, command = command_of(args, "proctor oracle record -o DIR -- python train.py")
    info = record(args, Path(args.output), command, overwrite=args.overwrite, reference=args.as_reference, generate=args.generate, whole=args.whole)
    print(describe(args.output, info))
    return 0


def record(
    args: argparse.Namespace, out: Path, command: Sequence[str], *, overwrite: bool, generate: int | None, reference: bool = False, **more: Any
) -> RunInfo:
    """Record a command as the arguments say, with parameters generated from a seed or its own; `more` are arguments of `Recorder`."""
    from proctor.oracle.plans.plan_toml import plan_of
    from proctor.oracle.recording.record import Recorder, dropout_of

    evaluations = args.evaluations if args.evaluations is not None else FORWARDS if args.forward else EVALUATIONS
    if args.steps < 1 or args.samples < 0 or evaluations < 0 or args.timeout <= 0:
        raise UsageError("--steps must be at least 1, --samples and --evaluations at least 0, --timeout more than 0")
    if args.statistics and args.dropout in ("replay", "keyed", "stock"):
        raise UsageError("--statistics goes with neither --dropout replay nor --rng: they need whole tensors")
    plan = plan_of(args.plan)
    given: dict[str, Any] = {  # Any: keyword arguments
        "steps": args.steps,
        "samples": args.samples,
        "plan": plan.to_json().decode() if plan is not None else "",
        "to_the_end": args.to_the_end,
        "timeout_s": args.timeout,
        "overwrite": overwrite,
        "reference": reference,
        "eager": args.eager,
        "options": {
            "generate": generate, "dropout": dropout_of(args.dropout, trusted=reference), "evaluations": evaluations, "until_evaluation": args.until_evaluation,
            "forward": args.forward, "statistics": args.statistics,
        },
    }
    return Recorder(out, command, **{**given, **more}).record()


def describe(out: str | Path, info: RunInfo) -> str:
    """One line about a recording."""
    ranks = f"{info.world} rank{'s' if info.world != 1 else ''}"
    steps = f"{info.steps} step{'s' if info.steps != 1 else ''}"
    samples = f", {info.samples} noise samples" if info.samples else ""
    notes = "".join(f"\n  note: {note}" for note in info.notes)
    return f"{out}: {info.program}, {ranks}, {steps}{samples}{notes}"
