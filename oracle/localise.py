"""Which module is wrong by itself: every module of the candidate is fed what the reference's module got.

An error in one module makes everything after it wrong (TTrace, Figure 9a). When each module's inputs, and the gradients
that come back to its outputs, are replaced by the reference's, errors stay where they are made (TTrace, Step 5). Values
that cross an edge are recorded before they are replaced, so that what lies between two modules is seen as well: it
belongs to the module around them. Since the values are the reference's own, only the candidate runs again.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from proctor.errors import OracleError
from proctor.oracle.assemble import GRADIENTS, PARTIAL, Piece
from proctor.oracle.averages import MEAN
from proctor.oracle.check import Comparison
from proctor.oracle.collect.config import key_of
from proctor.oracle.dtypes import as_float, from_float, is_floating
from proctor.oracle.inside import name_operation
from proctor.oracle.locate import FITS, near, take
from proctor.oracle.masks import masks
from proctor.oracle.optimizer import isolate_updates
from proctor.oracle.padding import filled
from proctor.oracle.record import Recorder
from proctor.oracle.reference import Key
from proctor.oracle.report import Report
from proctor.oracle.scalars import UNCLIPPED
from proctor.oracle.uncompiled import blame_compiler, compiles
from proctor.oracle.verdicts import Culprit, TensorVerdict, Verdict, failing, flow

BUDGET_S: Final = 300.0
LEAST_S: Final = 2.0  # below which another run is not worth beginning
DECISIONS: Final = ("choice", "dropout")
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
        budget_s: after which the search ends; the report then says so, and how far it came.
    """
    until = time.monotonic() + budget_s
    report = _noted_if_over(report, comparison, command, reference_command, min(timeout_s, budget_s), until)
    return dataclasses.replace(report, next_steps=())


def _noted_if_over(
    report: Report, comparison: Comparison, command: Sequence[str], reference_command: Sequence[str] | None, timeout_s: float, until: float
) -> Report:
    """What is found before the search is over; a program that fails, or takes too long, when it runs again takes nothing from the comparison."""
    try:
        return _localised(report, comparison, command, reference_command, timeout_s, until)
    except OracleError as e:
        over = time.monotonic() >= until
        why = "its time is over (--budget SECONDS)" if over else e.message
        return dataclasses.replace(report, verdict=_noting(report.verdict, f"the culprit was not found: {why}"))


def _localised(
    report: Report, comparison: Comparison, command: Sequence[str], reference_command: Sequence[str] | None, timeout_s: float, until: float
) -> Report:
    candidate = comparison.candidate
    again = Recorder.again(candidate, command, timeout_s=timeout_s)
    again.until = until
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
        found, note = culprit(report.verdict, alone), ""
        if found is not None and not found.decision:
            step = next((t.step for t in alone.tensors if failing(t)), 0)
            left = until - time.monotonic()
            if left < LEAST_S:
                note = f"the operation inside {found.module or 'the model'} was not looked for: the time for localising is over (--budget SECONDS)"
            else:
                try:
                    found, note = name_operation(comparison, candidate, found, step, (reference_command, command), folder, timeout_s=min(timeout_s, left / 2))
                except OracleError as e:
                    note = f"the operation inside {found.module or 'the model'} was not found: {e.message}"
        return _with(report, found, note)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def culprit(found: Verdict, alone: Verdict) -> Culprit | None:
    """Name what is wrong by itself.

    Args:
        found: end to end.
        alone: with every module fed the reference's values.
    """
    wrong = sorted((t for t in alone.tensors if failing(t) or (t.verdict == "unmapped" and t.ratio > 1.0 and t.rel_err < FITS)), key=flow)
    wrong = [t for t in wrong if t.step == wrong[0].step]  # what a later step begins with is wrong already
    missing = next((t for t in wrong if t.verdict == "missing" and t.kind == "param"), None)
    if missing is not None:
        return Culprit(missing.name.rpartition(".")[0], "model", missing.source, f"the candidate has no parameter {missing.name}")
    for kinds, direction in ((("input", "output", "score", *DECISIONS), "forward"), (GRADIENTS, "backward")):
        first = next((t for t in wrong if t.kind in kinds), None)
        if first is None:
            continue
        if first.kind in DECISIONS:
            said = f"{first.name or 'the model'}{' chooses otherwise' if first.kind == 'choice' else ''}: {first.note}"
            return Culprit(first.name, direction, first.source, said, first.ratio, decision=first.kind)
        inside = first.kind in ("output", "grad_input", "score")
        module = first.name if inside else first.name.rpartition(".")[0]
        what = "gives another result" if direction == "forward" else "gives another gradient of its input"
        if not inside:
            side = "into" if direction == "forward" else "back out of"
            what = f"what goes {side} {first.name} is wrong, and {first.name} itself is not the cause"
        partial = _partial_before(alone, first, "output" if direction == "forward" else "grad_input")
        if partial is not None:
            text = f"its ranks hold partial sums that nothing puts together before {module or 'the model'} uses them: an all-reduce is missing"
            return Culprit(partial.name, direction, partial.source, f"{partial.name}: {text}", first.ratio)
        return Culprit(module, direction, _source(found, alone, module) or first.source, f"fed with the reference's values, {module or 'the model'}: {what}", first.ratio)
    first = next((t for t in wrong if t.kind == "buffer_after"), None)
    if first is not None:
        return Culprit(first.name.rpartition(".")[0], "forward", first.source, f"the buffer {first.name} is not the reference's after the step: {first.note or 'it is computed otherwise'}", first.ratio)
    first = next((t for t in wrong if t.kind == "main_grad"), None)
    told = [t for v in (alone, found) for t in v.tensors if t.kind == "scalar" and failing(t) and t.note]
    clipping = next((t for t in told if t.name in ("clip_coefficient", "grad_norm")), None)
    if first is not None and first.slot != UNCLIPPED and clipping is not None:
        return Culprit("", "gradient", "", f"gradients of every module are right until they are clipped: {clipping.note}", first.ratio)
    if first is not None and (scale := _one_scale(alone)):
        return Culprit("", "gradient", "", f"forward and backward of every module are right; the gradients of all parameters have {scale} before the optimizer takes them: clipping, a loss scale or an average", first.ratio)
    if first is not None:
        module = first.name.rpartition(".")[0]
        apart = next((r for r in (*alone.replicas, *found.replicas) if r.kind == "main_grad" and r.name == first.name), None)
        why = apart.note if apart is not None else first.note or "its weight gradient, or what is done to it before the optimizer takes it"
        return Culprit(module, "gradient", first.source, f"forward and backward of every module are right; the gradient of {first.name} is not: {why}", first.ratio)
    first = next((t for t in wrong if t.kind in ("opt_state", "param_after")), None)
    if first is not None:
        what = f"given the reference's gradient, the update of {first.name} is not the reference's"
        if first.kind == "opt_state":
            what += f" (its {first.slot})"
        text = ": ".join(filter(None, [what, "; ".join(dict.fromkeys(filter(None, [first.note, *(t.note for t in told if t is not clipping)])))]))
        return Culprit(first.name.rpartition(".")[0], "update", first.source, text, first.ratio)
    first = next((t for t in wrong if t.kind == "master"), None)
    if first is not None:
        return Culprit(first.name.rpartition(".")[0], "update", first.source, f"{first.name}: {first.note}", first.ratio)
    apart = next((r for r in found.replicas if r.kind in ("param", "param_after")), None)
    if apart is not None:
        side = "model" if apart.kind == "param" else "update"
        return Culprit(apart.name.rpartition(".")[0], side, apart.source, f"{apart.name}: {apart.note}", apart.ratio)
    return None


def _one_scale(alone: Verdict) -> str:
    """The factor by which every gradient is wrong that optimizers took; "" where it is not one."""
    taken = [t for t in alone.tensors if t.kind == "main_grad" and t.slot != UNCLIPPED and t.verdict not in ("unmapped", "no-power")]
    said = {t.note for t in taken if failing(t)}
    scaled = len(said) == 1 and next(iter(said)).startswith("gradient scale ") and len(next(iter(said)).split()) == 3
    return next(iter(said)) if scaled and len(taken) > 2 and all(failing(t) or not t.abs_err for t in taken) else ""


def _partial_before(alone: Verdict, first: TensorVerdict, kind: str) -> TensorVerdict | None:
    """The last module inside the wrong one, or beside it, whose ranks hold addends of what the reference has."""
    inside = f"{first.name}." if first.name else ""
    held = [t for t in alone.tensors if t.kind == kind and t.layout == PARTIAL and t.order < first.order and t.step == first.step]
    found: TensorVerdict | None = None
    while near := [t for t in held if t.name.startswith(inside)]:
        found = max(near, key=lambda t: t.order)
        inside = f"{found.name}."
    return found


def _source(found: Verdict, alone: Verdict, module: str) -> str:
    return next((t.source for v in (alone, found) for t in v.tensors if t.name == module and t.kind in ("output", "input") and t.source), "")


def _with(report: Report, found: Culprit | None, note: str) -> Report:
    verdict = _noting(report.verdict, note)
    if found is None and not note:
        verdict = _noting(verdict, "with every module fed the reference's values nothing differs: the error arises between modules, or needs several of them")
    return dataclasses.replace(report, verdict=msgspec.structs.replace(verdict, culprit=found), next_steps=())


def _noting(verdict: Verdict, note: str) -> Verdict:
    return msgspec.structs.replace(verdict, notes=(*verdict.notes, note)) if note else verdict


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
                values = values * comparison.assembler.gradient_scale
            values = comparison.assembler.given(piece, values)
            call = piece.entry.call + comparison.ranks[piece.rank].dry.get(step, 0)
            files[piece.rank][key_of(step, kind, piece.entry.name, piece.entry.slot, call)] = _tensor(values, piece.entry.dtype)
    count = sum(map(len, files.values()))
    for rank, name, chosen in (*comparison.choices.values(), *masks(comparison.assembler, comparison.reference, all_of_them=False)):
        files[rank][name] = torch.from_numpy(chosen.copy())
    for rank, tensors in files.items():
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
    scale = comparison.assembler.gradient_scale if key[2] in GRADIENTS else 1.0
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
