"""From two recordings to what a person is told: the comparison and all that a report says beside it."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from proctor.errors import OracleError
from proctor.oracle.judging.check import Comparison
from proctor.oracle.judging.verdicts import Verdict, conclude, failing
from proctor.oracle.mapping.mapped import Mapped, mapped
from proctor.oracle.numbers.tolerance import Mode
from proctor.oracle.phases.forward import comparison_of
from proctor.oracle.phases.ranks_as_one import AsOne, as_one
from proctor.oracle.plans.names import compiled
from proctor.oracle.plans.plan import Plan
from proctor.oracle.plans.plan_toml import plan_of
from proctor.oracle.recording.fitted import Fitted, fitted
from proctor.oracle.report import Report
from proctor.oracle.store import MissingRank, Recording


class Compared(NamedTuple):
    """What is said of a comparison, the comparison itself (`None` where a rank is missing), and a plan of what was mapped by content, to be kept."""

    report: Report
    comparison: Comparison | None
    plan: Plan | None = None


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
    return compare_recordings(one, other, plan_for(other, plan), mode=mode).report.verdict


def plan_for(candidate: Recording, given: Plan | str | Path | None) -> Plan | None:
    """The plan that is given, an object or a file; without one that with which the candidate was recorded."""
    plan = plan_of(given)
    return plan if plan is not None or not candidate.info.plan else Plan.from_json(candidate.info.plan)


def check_plan(plan: Plan, comparison: Comparison) -> list[str]:
    """What a plan says of things that the runs do not have.

    Raises:
        OracleError: none of its rules matches anything.
    """
    params = {e.name: e.shape for e, _ in comparison.reference.parameters().values()}
    modules = {k[3]: e.shape for k, e in comparison.reference.entries.items() if k[2] == "output"}
    theirs = {e.name for record in comparison.ranks.values() for e in record.entries if e.kind in ("param", "output")}
    patterns = [r.path for r in plan.params] + [r.module for r in plan.activations] + [r.pattern for r in plan.renames]
    names = (params, modules, theirs)
    matched = (
        any(compiled(r.path).fullmatch(n) for r in plan.params for n in params)
        or any(compiled(r.module).fullmatch(n) for r in plan.activations for n in modules)
        or any(compiled(r.pattern).fullmatch(n) for r in plan.renames for n in theirs)
    )
    if patterns and not matched and all(names):
        shown = ", ".join(repr(p)[:60] for p in patterns[:3]) + (", …" if len(patterns) > 3 else "")
        raise OracleError(
            f"the plan matches nothing: no parameter or module of the reference is called {shown}",
            hint=f"proctor oracle plan PLAN RECORDING shows the names, such as {next(iter(params))}",
        )
    # Parameters without a rule are found by content, and renames are about the candidate's names.
    return [w for w in plan.understood(params, modules).warnings if not re.match(r"\d+ parameters? match|rename ", w)]


def record_and_compare(
    record: Callable[[int | None], tuple[Recording, Recording]], compare: Callable[[Recording, Recording], Compared], generate: int | None
) -> Compared:
    """Record both programs and compare them; once more with generated parameters where their own differ.

    Args:
        record: makes the reference's and the candidate's recording, with parameters generated from a seed or the programs' own.
        compare: the two.
        generate: the seed; `None` to find out whether one is needed.
    """
    found = compare(*record(generate))
    if generate is not None or found.report.verdict.alike:
        return found
    generated, apart = compare(*record(0)), found.report.verdict.replicas
    if not apart:
        return generated
    # Generated values took their place; the program's own replicas were never alike.
    verdict = generated.report.verdict
    both = conclude(verdict.tensors, (*apart, *verdict.replicas), unchecked=verdict.unchecked, notes=verdict.notes)
    return generated._replace(report=dataclasses.replace(generated.report, verdict=both))


def departs(found: Compared) -> int | None:
    """The first step in which runs differ, where it was not recorded in full; `None` where there is nothing to look at again."""
    if found.comparison is None or found.report.verdict.verdict != "different":
        return None
    verdict, whole = found.report.verdict, found.comparison.candidate.info.whole
    apart = [*(t.step for t in verdict.tensors if failing(t)), *(r.step for r in verdict.replicas)]
    first = min(apart, default=0)
    return first if whole and first not in whole and first < found.comparison.candidate.info.steps else None


def looked_again(found: Compared, compare: Callable[[int], Compared]) -> Compared:
    """The comparison, once more with all tensors of the step in which the runs part, where that was not recorded in full.

    Args:
        found: of runs of several steps.
        compare: records both again, that step in full, and compares.
    """
    step = departs(found)
    if step is None:
        return found
    again = compare(step)
    verdict = again.report.verdict
    note = f"the runs part in step {step} (counted from 0); both were recorded again with all tensors of it"
    return again._replace(report=dataclasses.replace(again.report, verdict=msgspec.structs.replace(verdict, notes=(note, *verdict.notes))))


def compare_recordings(
    reference: Recording,
    candidate: Recording,
    plan: Plan | None,
    *,
    mode: Mode = "all",
    page: str = "",
    next_steps: Sequence[str] = (),
    everything: bool = False,
) -> Compared:
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
    comparison: Comparison | None = None
    reference = as_one(reference)
    candidate = own = fitted(reference, candidate, plan)
    candidate, found = mapped(reference, candidate, plan)
    try:
        comparison = comparison_of(reference, candidate, plan, mode)
        warnings = check_plan(plan, comparison) if plan is not None else []
        verdict, world = comparison.run(), len(comparison.ranks)
        verdict = msgspec.structs.replace(verdict, notes=(*(f"plan: {w}" for w in warnings), *verdict.notes))
        mesh = str(comparison.mesh) if plan is not None else ""
        if isinstance(reference, AsOne) and reference.apart:
            names = ", ".join(name or "the model" for name in reference.apart[:3])
            verdict = msgspec.structs.replace(verdict, unchecked=(*verdict.unchecked, f"{len(reference.apart)} modules of the reference ({names}, …): its ranks hold parts of which nobody says where they lie"))
        if isinstance(own, Fitted):
            verdict = msgspec.structs.replace(verdict, unchecked=(*verdict.unchecked, *own.said()))
        if isinstance(candidate, Mapped):
            verdict = candidate.judged(verdict)
    except MissingRank as missing:
        verdict, mesh, world = conclude([], inconclusive=missing.message), "", candidate.info.world
    report = Report(
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
    return Compared(report, comparison, found)
