"""Data parallelism, measured: which inputs have rows, and how the outputs of parts of the rows make the output of all.

The model computes all rows, and each rank's rows alone; an output that is the parts one after the other is cut, one that is their mean or
their sum is an addend, and one that is the same for all parts is whole.
"""

from __future__ import annotations

import copy
import math
from typing import Final

import torch

from proctor.errors import OracleError
from proctor.oracle.parallel.deriving.patterns import slots_of
from proctor.oracle.parallel.deriving.rehearsal import Batch, slots
from proctor.oracle.plans.plan import Plan

_NEAR: Final = 1e-4  # of the largest number of an output: a forward of other rows rounds otherwise, by 1e-6


def add_rows(plan: Plan, model: torch.nn.Module, batch: Batch, axis: str) -> list[str]:
    """Rules of data parallelism.

    Args:
        plan: gets the rules.
        model: for one device.
        batch: with as many rows as the axis has ranks, or a multiple.
        axis: of data parallelism.

    Returns:
        what cannot be said, one line each.

    Raises:
        OracleError: the rows cannot be shared among the ranks.
    """
    parts = plan.mesh.size(axis)
    tensors = {place: tensor for place, tensor in batch.tensors().items() if tensor.dim()}
    if not tensors:
        raise OracleError("the batch holds no tensor with rows", hint="give a tensor, a tuple or a dict of them")
    rows = next(iter(tensors.values())).shape[0]
    if rows % parts:
        raise OracleError(f"the batch has {rows} rows, and {axis} has {parts} ranks", hint=f"make a batch whose rows are a multiple of {parts}")
    places = [place for place, tensor in tensors.items() if tensor.shape[0] == rows]
    slot = ".*" if len(places) == len(batch.tensors()) else slots_of(places, batch.tensors().keys() - places)
    plan.style("batch", "", axis, output="local", slot=slot)
    model = copy.deepcopy(model).eval()
    with torch.no_grad():
        whole = slots(model(*batch.args, **batch.kwargs))
        each = [batch.taken(i * rows // parts, (i + 1) * rows // parts, places) for i in range(parts)]
        found = [slots(model(*one.args, **one.kwargs)) for one in each]
    layouts: dict[int | str | None, list[str]] = {}
    notes = []
    for place, tensor in whole.items():
        pieces = [one[place] for one in found if place in one]
        try:
            layouts.setdefault(_layout(tensor, pieces), []).append(place)
        except ValueError:
            notes.append(f"output {place or 'of the model'} {list(tensor.shape)} of all rows is neither that of parts of the rows, nor their mean, nor their sum")
    layouts.pop(None, None)
    for layout, of in layouts.items():
        assert layout is not None
        slot = ".*" if len(of) == len(whole) else slots_of(of, whole.keys() - of)
        plan.redistribute("", at="output", src={axis: layout}, slot=slot)
    return notes


def _layout(whole: torch.Tensor, parts: list[torch.Tensor]) -> int | str | None:
    """How the parts make the whole, the way that comes nearest to it; None where each is the whole.

    Raises:
        ValueError: none comes near.
    """
    ways: list[tuple[float, int | str | None]] = [(max(_apart(whole, part) for part in parts), None)]
    for dim in range(whole.dim()):
        try:
            ways.append((_apart(whole, torch.cat(parts, dim)), dim))
        except RuntimeError:  # shapes that do not go together along it
            continue
    if whole.is_floating_point() and all(part.shape == whole.shape for part in parts):
        total = torch.stack(parts).sum(0)
        ways += [(_apart(whole, total / len(parts)), "partial-avg"), (_apart(whole, total), "partial")]
    distance, layout = min(ways, key=lambda way: way[0])
    if distance > _NEAR:
        raise ValueError
    return layout


def _apart(wanted: torch.Tensor, found: torch.Tensor) -> float:
    """The largest difference, of the largest number; infinite where shapes or whole numbers differ."""
    if wanted.shape != found.shape:
        return math.inf
    if not wanted.is_floating_point() or not wanted.numel():
        return 0.0 if torch.equal(wanted, found) else math.inf
    apart = (wanted.double() - found.double()).abs().masked_fill((wanted == found) | (wanted.isnan() & found.isnan()), 0.0)
    worst = float(apart.max())
    return math.inf if math.isnan(worst) else worst / max(float(wanted.double().nan_to_num(0.0, 0.0, 0.0).abs().max()), 1e-30)
