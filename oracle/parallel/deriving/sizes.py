"""Whole numbers that modules keep and that are those of a rank: found by trying.

A model that views its queries as [rows, time, heads, width] needs the heads of a rank. What such a number is called is the model's own affair, so each
that the axis divides is tried, of the layers that are cut, the module that holds them and the one around it; the one with which the model
comes furthest is taken, until it computes what one device computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Final, NamedTuple

import torch

from proctor.oracle.parallel.deriving.patterns import pattern_of
from proctor.oracle.parallel.deriving.rehearsal import Rehearsal, Trial
from proctor.oracle.plans.plan import Plan

_ROUNDS: Final = 6
_MOST_PAIRS: Final = 80


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
    """The plan with the numbers that it needs, and how it fares with them.

    Args:
        plan: stays as it is.
        rehearsal: of the model.
        axis: over which the model is cut.
        candidates: as `numbers` gives them.
    """
    best, trial = plan, rehearsal.cut(plan, [axis], train=False)
    left = list(candidates)
    for _ in range(_ROUNDS):
        if not trial.apart or not left:
            break
        tries = [(one,) for one in left]
        found = _best(best, rehearsal, axis, tries)
        if found is None or found[1].reached <= trial.reached:
            found = _best(best, rehearsal, axis, list(combinations(left, 2))[:_MOST_PAIRS])
        if found is None or found[1].reached <= trial.reached:
            break
        chosen, trial = found
        best = _with(best, chosen, axis)
        left = [one for one in left if one not in chosen]
    return best, trial


def _best(plan: Plan, rehearsal: Rehearsal, axis: str, tries: Sequence[tuple[Number, ...]]) -> tuple[tuple[Number, ...], Trial] | None:
    found = None
    for one in tries:
        trial = rehearsal.cut(_with(plan, one, axis), [axis], train=False)
        if not trial.apart:
            return one, trial
        if found is None or trial.reached > found[1].reached:
            found = one, trial
    return found


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
