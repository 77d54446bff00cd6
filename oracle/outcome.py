"""From two recordings to what a person is told: the comparison and all that a report says beside it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from proctor.oracle.check import Comparison
from proctor.oracle.plan import Plan
from proctor.oracle.plan_toml import read_plan
from proctor.oracle.report import Report
from proctor.oracle.store import MissingRank, Recording
from proctor.oracle.tolerance import Mode
from proctor.oracle.verdicts import Verdict, conclude


def compare(
    reference: str | Path, candidate: str | Path, plan: Plan | str | Path | None = None, *, mode: Mode = "all"
) -> Verdict:
    """Compare two recordings.

    Args:
        reference: directory, recorded with noise samples.
        candidate: directory.
        plan: how the candidate is cut, an object or a file; without one the plan that it was recorded with.
        mode: how tolerances are formed: `all`, or `paper` (TTrace's).

    Raises:
        OracleError: a directory is not a recording or is damaged, or the plan does not fit the candidate.
    """
    one, other = Recording(Path(reference)), Recording(Path(candidate))
    given = read_plan(Path(plan)) if isinstance(plan, str | Path) else plan
    return report_of(one, other, given if given is not None else stored_plan(other), mode=mode).verdict


def stored_plan(recording: Recording) -> Plan | None:
    """The plan that a recording was made with."""
    return Plan.from_json(recording.info.plan) if recording.info.plan else None


def report_of(
    reference: Recording,
    candidate: Recording,
    plan: Plan | None,
    *,
    mode: Mode = "all",
    page: str = "",
    next_steps: Sequence[str] = (),
    everything: bool = False,
) -> Report:
    """Compare, and say what a report needs; a rank that is missing makes it inconclusive.

    Args:
        reference: trusted.
        candidate: judged.
        plan: of the candidate.
        mode: of tolerances.
        page: the HTML report that is written too.
        next_steps: commands worth trying where the runs differ.
        everything: show all wrong tensors.
    """
    try:
        comparison = Comparison(reference, candidate, plan, mode)
        verdict, world = comparison.run(), len(comparison.ranks)
        mesh = str(comparison.mesh) if plan is not None else ""
    except MissingRank as missing:
        verdict, mesh, world = conclude([], inconclusive=missing.message), "", candidate.info.world
    return Report(
        verdict,
        reference=str(reference.path),
        candidate=str(candidate.path),
        reference_command=" ".join(reference.info.command),
        candidate_command=" ".join(candidate.info.command),
        mesh=mesh,
        world=world,
        samples=reference.info.samples,
        mode=mode,
        made=time.strftime("%Y-%m-%d %H:%M"),
        page=page,
        next_steps=next_steps if verdict.verdict == "different" else (),
        everything=everything,
    )
