"""Tensor parallelism of parameters that are no layer's: experts that are one tensor, matrices that a module multiplies itself.

Of those a forward does not say which feed which. But matrices of one module that follow each other share an extent (gate and up [E, 2·I, D], down
[E, D, I]): each such extent is cut in all of them, the module's outputs are taken for addends, and what computes what one device
computes is kept. What the module does with its other parameters (a router) it does on every rank for a part of the result, so their gradients are addends.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import torch

from proctor.oracle.parallel.deriving.flow import layers_of
from proctor.oracle.parallel.deriving.patterns import joined, pattern_of
from proctor.oracle.parallel.deriving.rehearsal import Rehearsal, Trial
from proctor.oracle.parallel.deriving.sizes import fitted, numbers
from proctor.oracle.parallel.verify import problems
from proctor.oracle.plans.plan import Plan
from proctor.oracle.plans.rules import ParamRule

_FUSED: Final = (1, 2, 3)  # matrices that may lie in one, after each other or by turns
_MOST_TRIALS: Final = 48


class Cutting(NamedTuple):
    """A way to cut a module's own parameters.

    Args:
        dims: layout by name of parameter, as a plan writes it.
        waiting: whether gradients of its other parameters are addends.
    """

    dims: Mapping[str, int | str]
    waiting: bool


def read(plan: Plan, rehearsal: Rehearsal, axis: str) -> tuple[Plan, list[str]]:
    """A plan of more rules, and what stays whole in it, one line each.

    Args:
        plan: stays as it is.
        rehearsal: of the model.
        axis: of tensor parallelism.
    """
    notes = []
    done: set[str] = set()
    for path, own in _owners(rehearsal.model).items():
        pattern = pattern_of(path, rehearsal.model)
        if pattern in done or not (ways := list(itertools.islice(_ways(own, plan.mesh.size(axis)), _MOST_TRIALS))):
            continue
        done.add(pattern)
        made, why = _tried(plan, rehearsal, path, ways, axis)
        if made is None:
            notes.append(f"{pattern}.({'|'.join(own)}) stays whole over {axis}: {why}")
        else:
            plan = made
    return plan, notes


def _owners(model: torch.nn.Module) -> dict[str, dict[str, torch.Size]]:
    """Shapes of parameters that modules other than layers hold themselves, by path and name."""
    layers, found = layers_of(model), {}
    for path, module in model.named_modules():
        own = {name: p.shape for name, p in module._parameters.items() if p is not None and p.dim() and p.is_floating_point()}
        if path not in layers and sum(len(shape) > 1 for shape in own.values()) > 1:
            found[path] = own
    return found


def _ways(own: Mapping[str, torch.Size], parts: int) -> Iterator[Cutting]:
    """Ways in which one extent is cut wherever it is found; of three dimensions and more the first counts experts."""
    places = {name: range(1 if len(shape) > 2 else 0, len(shape)) for name, shape in own.items()}
    extents = dict.fromkeys(own[name][dim] for name, dims in places.items() if len(own[name]) > 1 for dim in dims)
    for extent in (n for n in extents if n % parts == 0 and n > 1):
        choices: list[list[tuple[str, int, int | str] | None]] = []
        for name, dims in places.items():
            here = [(name, dim, k) for dim in dims for k in _FUSED if own[name][dim] == k * extent]
            fused: list[tuple[str, int, int | str] | None] = [(name, dim, f"interleaved:{dim}:{k}") for name, dim, k in here if k > 1]
            choices.append(fused + [(name, dim, dim) for name, dim, _ in here] or [None])
        for chosen in itertools.product(*choices):
            cuts = [one for one in chosen if one is not None]
            # A matrix whose outputs are cut has another one behind it whose inputs are.
            ends = {dim - len(own[name]) for name, dim, _ in cuts if len(own[name]) > 1}
            if len(ends) > 1:
                for waiting in (False, True):
                    yield Cutting({name: how for name, _, how in cuts}, waiting)


def _tried(plan: Plan, rehearsal: Rehearsal, path: str, ways: list[Cutting], axis: str) -> tuple[Plan | None, str]:
    furthest: tuple[Plan, Trial] | None = None
    why = ""
    for way in ways:
        made = _with(plan, rehearsal.model, path, way, axis)
        if said := problems(made, rehearsal.model):
            why = why or said[0]
            continue
        trial = rehearsal.cut(made, [axis], train=False)
        if not trial.apart:
            return made, ""
        why = why or trial.apart[0]
        if furthest is None or (trial.ended, trial.reached) > (furthest[1].ended, furthest[1].reached):
            furthest = made, trial
    if furthest is not None and not furthest[1].ended and (candidates := numbers(rehearsal.model, [path], plan.mesh.size(axis))):
        made, trial = fitted(furthest[0], rehearsal, axis, candidates)
        if not trial.apart:
            return made, ""
    return None, why


def _with(plan: Plan, model: torch.nn.Module, path: str, way: Cutting, axis: str) -> Plan:
    made, pattern = plan.on(plan.mesh), pattern_of(path, model)
    for name, how in way.dims.items():
        made.add(ParamRule(pattern_of(f"{path}.{name}" if path else name, model), made.rule({axis: how})))
    made.redistribute(pattern, at="input", grad_src={axis: "partial"})
    made.redistribute(pattern, at="output", src={axis: "partial"})
    others = [name for name, _ in model.get_submodule(path).named_parameters() if name not in way.dims]
    if way.waiting and others:
        made.pending(joined(dict.fromkeys(pattern_of(f"{path}.{name}" if path else name, model) for name in others)), axis)
    return made
