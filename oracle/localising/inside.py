"""Looks into the module that is wrong: both sides run again, and record the operations of that module alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from proctor.errors import OracleError
from proctor.oracle.judging.check import Comparison
from proctor.oracle.judging.verdicts import Culprit
from proctor.oracle.localising.ops import PHASES, Operation, Trace, first_wrong
from proctor.oracle.mapping.mapped import Mapped
from proctor.oracle.plans.mesh import rank_text
from proctor.oracle.recording.budget import Budget
from proctor.oracle.recording.record import Recorder
from proctor.oracle.store import Recording

RUN = "ops"


def name_operation(
    comparison: Comparison,
    candidate: Recording,
    culprit: Culprit,
    step: int,
    commands: tuple[Sequence[str] | None, Sequence[str]],
    force: Path,
    *,
    timeout_s: float = 3600.0,
    budget: Budget | None = None,
) -> tuple[Culprit, str]:
    """Say which operation of the culprit is the first to differ.

    Args:
        comparison: of the recordings, after its `run`.
        candidate: gets a run `ops`, as the reference does.
        culprit: a module, wrong in its forward or backward direction.
        step: in which.
        commands: of the reference and of the candidate; without the reference's nothing is looked for.
        force: what modules of the candidate are given.
        timeout_s: after which a command is ended.
        budget: of CPU seconds for both.

    Returns:
        the culprit, with an operation where one was found, and a note for the reader.
    """
    if culprit.direction not in PHASES:
        return culprit, ""
    if commands[0] is None:
        return culprit, "which operation is wrong was not looked for: the reference's command is needed for it (--reference-command)"
    reference = comparison.reference.recording
    module, names = culprit.module, comparison.names_of(culprit.module)
    if not names:
        return culprit, ""
    if isinstance(candidate, Mapped):
        own = candidate.own_names(module)
        if len(own) != 1 or any(own.values()):
            return culprit, f"which operation is wrong was not looked for: {module} is a part of {' and '.join(own) or 'another module'} in the candidate"
        names = dict.fromkeys(names, next(iter(own)))
    try:
        _record(
            (reference, commands[0], {rank: module for rank in comparison.reference.ranks}, ""),
            (candidate, commands[1], names, str(force.resolve())),
            step=step,
            timeout_s=timeout_s,
            budget=budget,
        )
        found, note = _compare(comparison, candidate, culprit, module)
    except OracleError as e:
        return culprit, f"which operation is wrong was not found: {e.message}"
    if found is not None and isinstance(candidate, Mapped) and not found.reference:
        return culprit, f"{found.label} {found.source} is the first operation that the reference has not, which says little of a program that is written otherwise".replace("  ", " ")
    if found is None:
        return culprit, note
    ranks = f" on {rank_text(found.ranks)}" if len(names) > 1 else ""
    text = f"{culprit.text}; the first operation that differs is {found}{ranks}"
    return msgspec.structs.replace(culprit, text=text, operation=f"{found.label} {found.source}".strip()), note


def _record(*sides: tuple[Recording, Sequence[str], dict[int, str], str], step: int, timeout_s: float, budget: Budget | None) -> None:
    with ThreadPoolExecutor(max_workers=len(sides)) as pool:
        jobs = []
        for recording, command, ops, force in sides:
            again = Recorder.again(recording, command, timeout_s=timeout_s)
            again.budget = budget
            jobs.append(pool.submit(again.once, RUN, ops=ops, ops_step=step, force=force, generate=recording.info.generate))
        for job in jobs:
            job.result()


def _compare(comparison: Comparison, candidate: Recording, culprit: Culprit, module: str) -> tuple[Operation | None, str]:
    theirs = [Trace(record) for record in comparison.reference.recording.ranks(RUN).values()]
    reference = next((t for t in theirs if any(op.phase == culprit.direction for op in t.log.ops)), None)
    mine = {rank: Trace(record) for rank, record in candidate.ranks(RUN).items()}
    if reference is None or not any(t.log.ops for t in mine.values()):
        return None, f"no operation of {module or 'the model'} was recorded: it is computed elsewhere, or again in the backward pass"
    call: Callable[[int, int], int] = lambda rank, at: comparison.call_of(rank, module, at)  # noqa: E731
    found = first_wrong(
        reference,
        {rank: t for rank, t in mine.items() if t.log.ops},
        culprit.direction,
        coords=comparison.coords,
        call=call,
        scale=comparison.assembler.gradient_scale,
    )
    cut = any(t.log.truncated for t in (reference, *mine.values()))
    return found, "not all operations of it were recorded: there are too many" if cut else ""
