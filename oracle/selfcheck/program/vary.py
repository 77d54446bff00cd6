"""The user's own variations: the same program with two sets of arguments computes the same.

`--vary "--batch-size 8 --accum 1" "--batch-size 4 --accum 2"`, `--vary "--nprocs 1" "--nprocs 2"`. The first is the reference of `proctor oracle run`, with
noise samples, tolerances, placement of shards and the localiser; the second is its candidate.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from proctor.errors import OracleError
from proctor.oracle.selfcheck import NotApplicable
from proctor.oracle.selfcheck.outcomes import Culprit, Outcome
from proctor.oracle.selfcheck.program import Program, ProgramRelation, register

if TYPE_CHECKING:
    from proctor.oracle.judging.verdicts import Verdict
    from proctor.oracle.recording.outcome import Compared
    from proctor.oracle.store import Recording

BUDGET_S = 300.0


@register
class Vary(ProgramRelation):
    """Records both, compares, localises."""

    name, claim = "vary", "arguments that must not matter do not matter"

    def check(self, program: Program) -> list[Outcome]:
        """See the class."""
        if not program.vary:
            raise NotApplicable('no variation was given (--vary "ARGS" "ARGS")')
        return [self._one(program, number, pair) for number, pair in enumerate(program.vary)]

    def _one(self, program: Program, number: int, pair: tuple[str, str]) -> Outcome:
        commands = [[*program.command, *shlex.split(arguments)] for arguments in pair]
        return compared(self, f"“{pair[0]}” against “{pair[1]}”", program.out / f"vary-{number}", commands, program.timeout_s)


def compared(relation: ProgramRelation, said: str, home: Path, commands: list[list[str]], timeout_s: float) -> Outcome:
    """Record two commands, compare, localise.

    Args:
        relation: whose outcome it is.
        said: the variation, in words.
        home: folder for recordings and the report.
        commands: the reference and the candidate.
        timeout_s: of each run.
    """
    from proctor.oracle.localising.localise import localise
    from proctor.oracle.report import renderer

    try:
        found = _recorded(home, commands, timeout_s)
    except OracleError as e:
        return Outcome(relation=relation.name, claim=relation.claim, subject=said, verdict="inconclusive", reason=e.message)
    report = found.report
    if report.verdict.verdict == "different" and found.comparison is not None:
        report = localise(report, found.comparison, commands[1], reference_command=commands[0], timeout_s=timeout_s, budget_s=BUDGET_S)
    page = home / "report.html"
    page.write_text(renderer("html").render(replace(report, page=str(page))), encoding="utf-8")
    return _outcome(relation, report.verdict, said, str(page))


def _recorded(home: Path, commands: list[list[str]], timeout_s: float) -> Compared:
    from proctor.oracle.recording.outcome import compare_recordings, looked_again, record_and_compare
    from proctor.oracle.recording.record import Recorder
    from proctor.oracle.recording.rerun import replay_decisions
    from proctor.oracle.store import Recording

    def record(seed: int | None, whole: int = 0) -> tuple[Recording, Recording]:
        for name, command in zip(("reference", "candidate"), commands, strict=True):
            trusted = name == "reference"
            Recorder(
                home / name, command, samples=4 if trusted else 0, eager=True, reference=trusted, whole=whole, timeout_s=timeout_s, overwrite=True,
                options={"generate": seed, "dropout": "keep"},
            ).record()  # fmt: skip
        both = Recording(home / "reference"), Recording(home / "candidate")
        replay_decisions(*both, None, commands[1], timeout_s=timeout_s)
        return both

    found = record_and_compare(record, lambda a, b: compare_recordings(a, b, None), None)
    seed = found.comparison.candidate.info.generate if found.comparison is not None else None
    return looked_again(found, lambda step: compare_recordings(*record(seed, step), None))


def _outcome(relation: ProgramRelation, verdict: Verdict, said: str, page: str) -> Outcome:
    common = {"relation": relation.name, "claim": relation.claim, "subject": said, "reason": verdict.reason}
    if verdict.verdict != "different":
        return Outcome(**common, verdict=verdict.verdict)  # type: ignore[arg-type]
    first, found = verdict.first, verdict.culprit
    culprit = Culprit(found.module or "the model", found.direction, found.source, getattr(found, "operation", "")) if found is not None else Culprit(first.name if first else "", "", first.source if first else "")
    return Outcome(
        **common, verdict="different", culprit=culprit, error=first.rel_err if first is not None else 0.0, tolerance=first.tolerance if first is not None else 0.0,  # type: ignore[arg-type]
        expected="what the first arguments compute", seen=found.text if found is not None else f"{first.name} differs" if first is not None else "replicas differ", advice=f"the whole comparison: {page}",
    )  # fmt: skip
