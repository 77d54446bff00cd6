"""For a framework's own tests: assert that a parallel run is the same computation as its reference.

    from proctor.oracle.testing import assert_equivalent

    def test_tensor_parallel() -> None:
        assert_equivalent("python train.py", "torchrun --nproc-per-node 2 train.py --tp 2")

    def test_sequence_parallel() -> None:                      # functions of this file, on processes of their own
        assert_equivalent(train_alone, train_parallel, nprocs=2)
"""

from __future__ import annotations

import dataclasses
import shlex
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from proctor.errors import UsageError
from proctor.oracle.judging.verdicts import Verdict
from proctor.oracle.localising.localise import localise as _localise
from proctor.oracle.numbers.tolerance import Mode
from proctor.oracle.plans.plan import Plan
from proctor.oracle.plans.plan_toml import plan_of
from proctor.oracle.recording.outcome import Compared, compare_recordings, looked_again, record_and_compare
from proctor.oracle.recording.ranks import command_of
from proctor.oracle.recording.record import SAMPLES, Recorder, dropout_of
from proctor.oracle.recording.rerun import replay_decisions
from proctor.oracle.report import Report, renderer
from proctor.oracle.store import Recording

Program = str | Sequence[str] | Callable[..., object]

NOTES: Final = 3  # of the report in the text of an assertion


def assert_equivalent(
    reference: Program,
    candidate: Program,
    plan: Plan | str | Path | None = None,
    *,
    samples: int = SAMPLES,
    nprocs: int = 2,
    steps: int = 1,
    generate: int | None = None,
    mode: Mode = "all",
    localise: bool = True,
    eager: bool = False,
    dropout: Literal["keep", "replay", "draw", "keyed", "stock"] = "keep",
    out: str | Path | None = None,
    timeout_s: float = 600.0,
) -> Verdict:
    """Record both, compare them, and fail where they differ or nothing can be said.

    Args:
        reference: the trusted run of one rank: a command (text or list), or a function of a file's top level, with or
            without `functools.partial`, which is called in a process of its own.
        candidate: what is judged, likewise. A function is called on every rank, with a gloo process group.
        plan: how the candidate is cut, an object or a file; found out without one.
        samples: runs of the reference with noise, from which tolerances follow.
        nprocs: ranks of a candidate that is a function; a command starts its own.
        steps: optimizer updates to compare.
        generate: seed of generated parameters; by default the programs' own, and generated ones where those differ.
        mode: how tolerances are formed.
        eager: what the candidate wraps in `torch.compile` runs uncompiled, as it does in the reference.
        localise: run the candidate again to name the module that is wrong.
        dropout: `keep`: it keeps everything in the steps that are compared, and its probabilities are; `replay`: the candidate gets
            the reference's masks; `draw`: it is left alone; `keyed`, `stock`: every rank draws its part of what one device draws, as `oracle run --rng`.
        out: where recordings are kept; without it they go when this returns.
        timeout_s: of each run.

    Returns:
        the verdict, which is `equivalent`.

    Raises:
        AssertionError: they differ, or nothing can be said; its text is the head of the report.
        OracleError: a program failed or recorded nothing, or the plan does not fit.
        UsageError: a command cannot be started, or a function not be imported elsewhere.
    """
    __tracebackhide__ = True
    commands = _command(reference, 1), _command(candidate, nprocs)
    given = plan_of(plan)
    with tempfile.TemporaryDirectory(prefix="proctor-oracle-") as folder:
        home = Path(out) if out is not None else Path(folder)
        options: dict[str, Any] = {  # Any: keyword arguments
            "steps": steps, "timeout_s": timeout_s, "overwrite": True,
            "plan": given.to_json().decode() if given is not None else "",
        }  # fmt: skip

        def record(seed: int | None, whole: int = 0) -> tuple[Recording, Recording]:
            for name, command in zip(("reference", "candidate"), commands, strict=True):
                trusted = name == "reference"
                Recorder(
                    home / name, command, samples=samples if trusted else 0, eager=eager or trusted, whole=whole,
                    beside=None if trusted else Recording(home / "reference"), **options,
                    options={"generate": seed, "dropout": dropout_of(dropout, trusted=trusted)},
                ).record()  # fmt: skip
            both = Recording(home / "reference"), Recording(home / "candidate")
            replay_decisions(*both, given, commands[1], timeout_s=timeout_s)
            return both

        def compare(one: Recording, other: Recording) -> Compared:
            return compare_recordings(one, other, given, mode=mode)

        found = record_and_compare(record, compare, generate)
        seed = found.comparison.candidate.info.generate if found.comparison is not None else None
        report, comparison, _ = looked_again(found, lambda step: compare(*record(seed, step)))
        if report.verdict.verdict == "different" and comparison is not None and localise:
            report = _localise(report, comparison, commands[1], reference_command=commands[0], timeout_s=timeout_s)
    if report.verdict.verdict != "equivalent":
        raise AssertionError(_head(report, kept=out is not None))
    return report.verdict


def _command(program: Program, nprocs: int) -> list[str]:
    if callable(program):
        if nprocs < 1:
            raise UsageError(f"nprocs={nprocs}: at least 1")
        return command_of(program, nprocs)
    try:
        command = shlex.split(program) if isinstance(program, str) else [str(word) for word in program]
    except ValueError as e:
        raise UsageError(f"{str(program)[:80]}: {e}") from None
    if not command:
        raise UsageError("an empty command")
    return command


def _head(report: Report, *, kept: bool) -> str:
    """The report without its tables."""
    short = msgspec.structs.replace(report.verdict, tensors=(), unchecked=(), notes=report.verdict.notes[:NOTES])
    one, other = (report.reference, report.candidate) if kept else ("", "")
    shown = dataclasses.replace(report, verdict=short, next_steps=(), reference=one, candidate=other)
    return "\n" + renderer("terminal").render(shown).rstrip()
