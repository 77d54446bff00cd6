"""How the tensors lie that modules draw at random: their shapes on a rank beside those on one device say it.

A dimension that has a part of the elements is cut along the axis over which the model was cut for the comparison.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from proctor.oracle.parallel.deriving.patterns import joined, pattern_of
from proctor.oracle.parallel.deriving.rehearsal import Drawn, Rehearsal
from proctor.oracle.plans.names import compiled
from proctor.oracle.plans.plan import Plan

_ANY = ".*"


def add_draws(plan: Plan, rehearsal: Rehearsal, axes: Sequence[str]) -> list[str]:
    """Rules of draws, from one forward on one device and one for each axis.

    Args:
        plan: all but its draws; gets them.
        rehearsal: of the model.
        axes: of more than one rank.

    Returns:
        what cannot be said, one line each.
    """
    noting = plan.on(plan.mesh).draw(_ANY)
    whole = rehearsal.alone(noting, train=True).drawn
    notes: list[str] = []
    cuts: dict[tuple[str, int], dict[str, int | str]] = {(pattern_of(path, rehearsal.model), len(shape)): {} for path, shape in whole}
    for axis in axes if whole else ():
        drawn = rehearsal.cut(noting, [axis], train=True).drawn
        if [path for path, _ in drawn] != [path for path, _ in whole]:
            notes.append(f"modules that draw are other ones when the model is cut over {axis}")
            continue
        notes += _along(whole, drawn, axis, plan.mesh.size(axis), cuts, rehearsal.model)
    layouts: dict[tuple[tuple[str, int | str], ...], list[tuple[str, int]]] = {}
    for of, layout in cuts.items():
        layouts.setdefault(tuple(layout.items()), []).append(of)
    for same, group in layouts.items():
        by_size: dict[int, list[str]] = {}
        for pattern, ndim in group:
            only = any(other == pattern and n != ndim for other, n in cuts)
            by_size.setdefault(ndim if only else 0, []).append(pattern)
        for ndim, patterns in by_size.items():
            plan.draw(joined(patterns), ndim=ndim, **dict(same))  # type: ignore[arg-type]  # axes are not named as its options
    return notes


def folds(plan: Plan, model: torch.nn.Module, axis: str) -> list[Plan]:
    """Plans in which a dimension that the axis cuts, and that a module draws, is rows times one of the numbers that the module has a part of.

    Args:
        plan: complete.
        model: for one device.
        axis: of tensor parallelism.
    """
    found = []
    for at, rule in enumerate(plan.draws):
        cut = next((c for c in rule.rule.cuts if c.axis == axis and c.strategy == "chunk" and c.dim >= 0), None)
        if cut is None or rule.fold:
            continue
        inner = {
            int(getattr(module, name))
            for path, module in model.named_modules() if compiled(rule.module).fullmatch(path)
            for size in plan.sizes if size.axis == axis and compiled(size.module).fullmatch(path) for name in size.names
        }  # fmt: skip
        for number in sorted(inner):
            cuts = tuple(msgspec.structs.replace(c, dim=c.dim + 1) if c.dim > cut.dim or c is cut else c for c in rule.rule.cuts)
            other = plan.on(plan.mesh)
            other.draws[at] = msgspec.structs.replace(rule, rule=msgspec.structs.replace(rule.rule, cuts=cuts), fold=(cut.dim, number))
            found.append(other)
    return found


def _along(whole: Drawn, drawn: Drawn, axis: str, size: int, cuts: dict[tuple[str, int], dict[str, int | str]], model: torch.nn.Module) -> list[str]:
    notes = []
    for (path, shape), (_, part) in zip(whole, drawn):
        dims = [d for d, (n, m) in enumerate(zip(shape, part)) if n != m]
        if len(shape) != len(part) or len(dims) > 1 or any(shape[d] != size * part[d] for d in dims):
            notes.append(f"{path or 'the model'} draws {list(part)} on a rank along {axis} and {list(shape)} on one device")
        else:
            found = cuts[pattern_of(path, model), len(shape)]
            if dims and found.setdefault(axis, dims[0]) != dims[0]:
                notes.append(f"{path or 'the model'} draws tensors of {len(shape)} dimensions that are cut over {axis} in two ways")
    return notes
