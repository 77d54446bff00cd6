"""Which module is wrong by itself: every module of the candidate is fed what the reference's module got.

An error in one module makes everything after it wrong (TTrace, Figure 9a). When each module's inputs, and the gradients
that come back to its outputs, are replaced by the reference's, errors stay where they are made (TTrace, Step 5). Values
that cross an edge are recorded before they are replaced, so that what lies between two modules is seen as well: it
belongs to the module around them. Since the values are the reference's own, only the candidate runs again.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from proctor.errors import OracleError
from proctor.oracle.judging.blame import Absent, culprit
from proctor.oracle.judging.check import Comparison
from proctor.oracle.judging.verdicts import Culprit, Verdict, failing
from proctor.oracle.localising.inside import name_operation
from proctor.oracle.localising.optimizer import isolate_updates
from proctor.oracle.mapping.mapped import Mapped
from proctor.oracle.merging.assemble import PARTIAL, Piece
from proctor.oracle.merging.averages import MEAN
from proctor.oracle.merging.locate import near, take
from proctor.oracle.merging.padding import filled
from proctor.oracle.merging.reference import Key
from proctor.oracle.numbers.dtypes import as_float, from_float, is_floating
from proctor.oracle.phases.evaluation import culprit_of
from proctor.oracle.recording.budget import Budget
from proctor.oracle.recording.masks import masks
from proctor.oracle.recording.record import Recorder
from proctor.oracle.recording.uncompiled import blame_compiler, compiles
from proctor.oracle.report import Report
from proctor.oracle.store import Recording
from proctor.oracle.tensors import key_of

BUDGET_S: Final = 300.0
LEAST_S: Final = 2.0  # below which another run is not worth beginning
_GIVEN: Final = frozenset({"float64", "float32", "float16", "bfloat16"})  # types of values that modules can be given


def localise(
    report: Report,
    comparison: Comparison,
    command: Sequence[str],
    *,
    reference_command: Sequence[str] | None = None,
    timeout_s: float = 3600.0,
    budget_s: float = BUDGET_S,
) -> Report:
    """Add the culprit to the report of a comparison that found a difference.

    Args:
        report: of the comparison.
        comparison: after its `run`; the candidate's recording gets a run `forced`.
        command: the candidate's.
        reference_command: the reference's; with it the operation inside the module is looked for.
        timeout_s: after which the command is ended.
        budget_s: CPU seconds of all that is run, after which the search ends; the report then says so, and how far it came. It also ends
            after ten times as long on the clock.
    """
    report = _noted_if_over(report, comparison, command, reference_command, timeout_s, Budget(budget_s))
    return dataclasses.replace(report, next_steps=())


def _noted_if_over(
    report: Report, comparison: Comparison, command: Sequence[str], reference_command: Sequence[str] | None, timeout_s: float, budget: Budget
) -> Report:
    """What is found before the search is over; a program that fails, or takes too long, when it runs again takes nothing from the comparison."""
    try:
        return _localised(report, comparison, command, reference_command, timeout_s, budget)
    except OracleError as e:
        why = "its CPU seconds are used up (--budget SECONDS)" if budget.over() else e.message
        return dataclasses.replace(report, verdict=_noting(report.verdict, f"the culprit was not found: {why}"))


def _localised(
    report: Report, comparison: Comparison, command: Sequence[str], reference_command: Sequence[str] | None, timeout_s: float, budget: Budget
) -> Report:
    candidate = comparison.candidate
    if any(t.kind == "param" and failing(t) for t in report.verdict.tensors):
        return _with(report, culprit(report.verdict, report.verdict), "")
    if (evaluated := culprit_of(report.verdict)) is not None:
        return _with(report, evaluated, "")
    if candidate.info.statistics:
        return _with(report, _where_they_part(report.verdict), "only statistics were recorded, so modules were not fed the reference's values: the culprit is where the runs part first")
    again = Recorder.again(candidate, command, timeout_s=timeout_s)
    again.budget = budget
    said = ""
    if compiles(candidate):
        found, said, comparison = blame_compiler(comparison, report.verdict, again)
        if found is not None:
            return _with(report, found, said)
    report = dataclasses.replace(report, verdict=_noting(report.verdict, said))
    folder = candidate.path / "forced"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        if not _write(comparison, folder):
            return _with(report, None, "no module's input could be replaced, so the culprit was not looked for")
        again.once("forced", force=str(folder.resolve()), generate=candidate.info.generate)
        forced = Comparison(comparison.reference.recording, candidate, comparison.plan, comparison.mode, run="forced")
        alone = isolate_updates(forced, forced.run())
        # Code with other names may well hand on other things, so nothing is said to be lacking there.
        found, note = culprit(report.verdict, alone, {} if isinstance(candidate, Mapped) else _absent(comparison)), ""
        if found is not None and not found.decision:
            step = next((t.step for t in alone.tensors if failing(t)), 0)
            if budget.left_s() < LEAST_S:
                note = f"the operation inside {found.module or 'the model'} was not looked for: the CPU seconds for localising are used up (--budget SECONDS)"
            else:
                try:
                    found, note = name_operation(comparison, candidate, found, step, (reference_command, command), folder, timeout_s=timeout_s, budget=budget)
                except OracleError as e:
                    note = f"the operation inside {found.module or 'the model'} was not found: {e.message}"
        return _with(report, _by_both_names(found, candidate), note)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _by_both_names(found: Culprit | None, candidate: Recording) -> Culprit | None:
    """A culprit that is called as in the reference, and what the candidate calls it."""
    if found is None or not isinstance(candidate, Mapped):
        return found
    own = list(candidate.own_names(found.module))
    return msgspec.structs.replace(found, text=f"{found.text}; the candidate calls it {' and '.join(own)}") if own and own != [found.module] else found


def _where_they_part(verdict: Verdict) -> Culprit | None:
    """The culprit of a comparison in which nothing was fed."""
    begins = culprit(verdict, verdict)
    return msgspec.structs.replace(begins, text=begins.text.removeprefix("fed with the reference's values, ")) if begins is not None else None


def _with(report: Report, found: Culprit | None, note: str) -> Report:
    verdict = _noting(report.verdict, note)
    if found is None and not note:
        verdict = _noting(verdict, "with every module fed the reference's values nothing differs: the error arises between modules, or needs several of them")
    return dataclasses.replace(report, verdict=msgspec.structs.replace(verdict, culprit=found), next_steps=())


def _noting(verdict: Verdict, note: str) -> Verdict:
    return msgspec.structs.replace(verdict, notes=(*verdict.notes, note)) if note else verdict


def _absent(comparison: Comparison) -> Absent:
    """What modules of the reference get in the first step and none of the candidate's does, though it runs."""
    reference, held = comparison.reference, comparison.assembler.pieces
    runs = {k[3] for k in held if k[0] == 0 and k[2] == "output"}
    comes_back = {k[3] for k in held if k[0] == 0 and k[2] == "grad_output"}
    wanted = [k for k in reference.order if k[:2] == (0, 0) and k[2] in ("input", "grad_output") and k[3] in runs and k not in held]
    return {(k[2], k[3]): k[4] for k in wanted if k[2] == "input" or k[3] not in comes_back}


def _write(comparison: Comparison, folder: Path) -> int:
    """Write for every rank what its modules are to be given; returns how many values."""
    import torch
    from safetensors.torch import save_file

    files: dict[int, dict[str, Any]] = {rank: {} for rank in comparison.ranks}
    for key, held in comparison.shards():
        step, _, kind, name, _ = key
        if kind == "param" and step == 0:
            _write_gradients(comparison, name, held, files)
        if kind not in ("input", "grad_output"):
            continue
        target = comparison.reference.entries[key]
        for piece in _certain(comparison, key):
            if piece.places is None or piece.entry.dtype not in _GIVEN or target.dtype not in _GIVEN:
                continue
            values = as_float(take(comparison.reference.array(target), piece.places), target.dtype)
            if kind == "grad_output":
                values = values * comparison.assembler.scale(kind, key[4])
            values = comparison.assembler.given(piece, values)
            call = piece.entry.call + comparison.ranks[piece.rank].dry.get(step, 0)
            files[piece.rank][key_of(step, kind, piece.entry.name, piece.entry.slot, call)] = _tensor(values, piece.entry.dtype)
    count = sum(map(len, files.values()))
    for rank, name, chosen in (*comparison.choices.values(), *masks(comparison.assembler, comparison.reference, all_of_them=False)):
        files[rank][name] = torch.from_numpy(chosen.copy())
    for rank, tensors in (comparison.candidate.own(files) if isinstance(comparison.candidate, Mapped) else files).items():
        save_file(tensors, str(folder / f"rank{rank}.safetensors"))
    return count


def _certain(comparison: Comparison, key: Key) -> Sequence[Piece]:
    """The shards of a tensor that are parts of the reference's: not summands of it, and not what merely has its shape."""
    merged = comparison.assembler.merge(key)
    if merged is None or any(p.addend or p.label in (PARTIAL, MEAN) for p in merged.pieces):
        return ()
    alike = not merged.conflicts and len({p.rank for p in merged.pieces}) > 1
    if alike or all(p.firm for p in merged.pieces):
        return merged.pieces
    target = comparison.reference.entries[key]
    if not is_floating(target.dtype):
        return ()
    theirs = comparison.reference.floats(target)
    scale = comparison.assembler.scale(key[2], key[4])
    return [
        p
        for p in merged.pieces
        if p.firm or (p.places is not None and near(as_float(comparison.assembler.values(p), p.entry.dtype), take(theirs, p.places) * scale))
    ]


def _write_gradients(comparison: Comparison, name: str, held: Sequence[Piece], files: Mapping[int, dict[str, Any]]) -> None:
    """The reference's gradients of the parts of a parameter that ranks hold, for the optimizer."""
    for step in range(comparison.reference.recording.info.steps):
        target = comparison.reference.entries.get((step, 0, "main_grad", name, ""))
        if target is None or target.dtype not in _GIVEN:
            continue
        for piece in held:
            if piece.places is not None and len(piece.places) == len(target.shape):
                values = as_float(take(comparison.reference.array(target), piece.places), target.dtype)
                values = filled(np.zeros(piece.entry.shape), piece.kept, values)
                files[piece.rank][key_of(step, "main_grad", piece.entry.name, "", 0)] = _tensor(values, target.dtype)


def _tensor(values: np.ndarray[Any, Any], dtype: str) -> Any:
    """A torch tensor with these values, rounded to a type."""
    import torch

    raw = np.ascontiguousarray(from_float(values, dtype))
    if dtype == "bfloat16":
        return torch.from_numpy(raw.view(np.int16)).view(torch.bfloat16).clone()
    return torch.from_numpy(raw).clone()
