"""Whole numbers that modules keep and that are those of a rank: found by trying.

A model that views its queries as [rows, time, heads, width] needs the heads of a rank. What such a number is called is the model's own affair, so each
that the axis divides is tried, of the layers that are cut, the module that holds them and the one around it, until the model computes what one
device computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import torch

from proctor.oracle.parallel.deriving.patterns import pattern_of
from proctor.oracle.parallel.deriving.rehearsal import Rehearsal, Trial
from proctor.oracle.plans.plan import Plan

_MOST_NUMBERS: Final = 6
_MOST_TRIALS: Final = 200


class Number(NamedTuple):
    """An attribute of all modules of a pattern."""

    module: str
    name: str


def numbers(model: torch.nn.Module, layers: Iterable[str], parts: int) -> list[Number]:
    """Candidates.

    Args:
        model: has them.
        layers: paths of layers that are cut.
        parts: ranks.
    """
    modules = dict(model.named_modules())
    paths: dict[str, None] = {}
    for layer in layers:
        names = layer.split(".")
        paths |= dict.fromkeys(".".join(names[:n]) for n in range(len(names), max(len(names) - 3, 0), -1))
        if len(names) <= 2:
            paths[""] = None
    by_pattern: dict[str, list[torch.nn.Module]] = {}
    for path in paths:
        module = modules[path]
        if not isinstance(module, torch.nn.Linear):  # its numbers are for show
            by_pattern.setdefault(pattern_of(path, model), []).append(module)
    found = []
    for pattern, group in by_pattern.items():
        for name, value in vars(group[0]).items():
            if name.startswith("_") or type(value) is not int or value < 2:
                continue
            if all(type(n := getattr(module, name, None)) is int and n % parts == 0 and n > 1 for module in group):
                found.append(Number(pattern, name))
    return found


def fitted(plan: Plan, rehearsal: Rehearsal, axis: str, candidates: Sequence[Number]) -> tuple[Plan, Trial]:
    """The plan with the numbers that it needs, or with those with which it comes furthest; and how it fares with them.

    Which numbers go on from here: those with which a forward came furthest before it stopped. One that ends and computes something else has a
    wrong number among them, most likely (a head's width for the number of heads), so it is looked into last.

    Args:
        plan: stays as it is.
        rehearsal: of the model.
        axis: over which the model is cut.
        candidates: as `numbers` gives them.
    """
    trial = rehearsal.cut(plan, [axis], train=False)
    furthest = plan, trial
    waiting = [(trial, frozenset[Number]())]
    tried = {frozenset[Number]()}
    while trial.apart and waiting and len(tried) < _MOST_TRIALS:
        waiting.sort(key=lambda one: (not one[0].ended, one[0].reached))
        came, chosen = waiting.pop()
        for number in candidates:
            more = chosen | {number}
            if more in tried or len(more) > _MOST_NUMBERS:
                continue
            tried.add(more)
            trial = rehearsal.cut(_with(plan, sorted(more), axis), [axis], train=False)
            if not trial.apart:
                return _with(plan, sorted(more), axis), trial
            if trial.reached > came.reached:
                waiting.append((trial, more))
            if (trial.ended, trial.reached) > (furthest[1].ended, furthest[1].reached):
                furthest = _with(plan, sorted(more), axis), trial
    return furthest


def _with(plan: Plan, chosen: Iterable[Number], axis: str) -> Plan:
    made = plan.on(plan.mesh)
    for one in chosen:
        same = next((i for i, rule in enumerate(made.sizes) if rule.module == one.module and rule.axis == axis), None)
        if same is None:
            made.size(one.module, one.name, axis=axis)
        else:
            names = (*made.sizes.pop(same).names, one.name)
            made.size(one.module, *names, axis=axis)
    return made
