"""Tensor parallelism found from a forward (`flow`): of each pair of layers that follow each other the outputs of the first are cut, and the inputs of the second.

Layers that belong together are tried alone, by the numbers of one device; what does not compute the same when it is cut stays whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from proctor.oracle.parallel.deriving.flow import Flow, follow, layers_of
from proctor.oracle.parallel.deriving.patterns import joined, pattern_of
from proctor.oracle.parallel.deriving.rehearsal import Rehearsal
from proctor.oracle.parallel.deriving.sizes import fitted, numbers
from proctor.oracle.parallel.verify import problems
from proctor.oracle.plans.plan import Plan
from proctor.oracle.plans.rules import ParamRule


def read(plan: Plan, rehearsal: Rehearsal, axis: str) -> tuple[Plan, list[str]]:
    """A plan of more rules, and what stays whole in it, one line each.

    Args:
        plan: stays as it is.
        rehearsal: of the model.
        axis: of tensor parallelism.
    """
    parts = plan.mesh.size(axis)
    flow = _settled(rehearsal, parts)
    notes = []
    for group in _groups(flow, rehearsal.model, parts):
        made, why = _tried(plan, rehearsal, flow, group, axis)
        if made is None:
            notes.append(f"{joined(pattern_of(path, rehearsal.model) for path in group)} stays whole over {axis}: {why}")
        else:
            plan = made
    return plan, notes


def _settled(rehearsal: Rehearsal, parts: int) -> Flow:
    """The flow once all layers that must stay whole are known; layers of a pattern are cut alike."""
    model = rehearsal.model
    whole: set[str] = set()
    odd = {path for path, layer in layers_of(model).items() if layer.out % parts}  # never cut along outputs, so they feed nothing
    while True:
        flow = follow(model, rehearsal.batch, whole | odd)
        linear = [path for path, layer in flow.layers.items() if layer.kind == "linear"]
        fed = {path for path in linear if flow.feeds.get(path) and path not in whole}
        feeding = frozenset[str]().union(*flow.feeds.values())
        more = flow.whole | (flow.leaves & feeding) | {p for p in linear if p not in fed and flow.layers[p].out % parts}
        more |= {p for p in linear if p not in flow.feeds}
        alike: dict[str, set[bool]] = {}
        for path in linear:
            alike.setdefault(pattern_of(path, model), set()).add(path in fed)
        patterns = {pattern_of(path, model) for path in more | whole} | {p for p, ways in alike.items() if len(ways) > 1}
        more = {path for path in linear if pattern_of(path, model) in patterns}
        if more <= whole:
            last = list(flow.feeds)[-1:]
            # What a loss needs whole can still be cut and put together, and a head is the largest layer.
            flow.leaves |= {p for p in last if p in whole and not flow.feeds[p] and flow.layers[p].out % parts == 0}
            return flow
        whole |= more


def _groups(flow: Flow, model: torch.nn.Module, parts: int) -> list[list[str]]:
    """Layers that are cut together: those that feed a layer with it, a head alone or with the embedding that is tied to it."""
    found: list[set[str]] = []
    for path, feeders in flow.feeds.items():
        if feeders:  # of none that stays whole: what feeds such a layer is whole, too
            found.append({path, *feeders})
        elif path in flow.leaves:
            found.append({path})
    tables = {path: model.get_submodule(path).weight for path, layer in flow.layers.items() if layer.kind == "table"}
    for path, weight in tables.items():
        tied = next((group for group in found for other in group if model.get_submodule(other).weight is weight), None)
        if tied is not None:
            tied.add(path)
    rows = {path: weight.shape[0] for path, weight in tables.items() if not any(path in group for group in found) and weight.shape[0] % parts == 0}
    if rows and (largest := max(rows, key=rows.__getitem__)):
        found.append({largest})
    order = list(flow.layers)
    joint: dict[frozenset[str], set[str]] = {}
    for group in found:
        patterns = frozenset(pattern_of(path, model) for path in group)
        meets = [key for key in joint if key & patterns]
        merged = group.union(*(joint.pop(key) for key in meets))
        joint[patterns.union(*meets)] = merged
    return [sorted(group, key=order.index) for group in joint.values()]


def _tried(plan: Plan, rehearsal: Rehearsal, flow: Flow, group: list[str], axis: str) -> tuple[Plan | None, str]:
    why = ""
    candidates = numbers(rehearsal.model, [path for path in group if flow.layers[path].kind == "linear"], plan.mesh.size(axis))
    counted = _counted(rehearsal.model, {path: flow.layers[path].out for path in group}, plan.mesh.size(axis))
    for blocks, heads in itertools.product(_ways(flow, group, rehearsal.model), [(), counted] if counted else [()]):
        made = plan.on(plan.mesh)
        add_layers(made, flow, group, axis, rehearsal.model, blocks, heads)
        tie(made, rehearsal.model)
        if said := problems(made, rehearsal.model):
            why = why or said[0]
            continue
        made, trial = fitted(made, rehearsal, axis, candidates)
        if not trial.apart:
            return made, ""
        why = why or trial.apart[0]
    return None, why


def _counted(model: torch.nn.Module, widths: Mapping[str, int], parts: int) -> tuple[str, ...]:
    """Patterns of parameters beside layers, with one number for as many outputs each (a sink or a scale for each head)."""
    found: dict[str, None] = {}
    for path, width in widths.items():
        around = path.rpartition(".")[0]
        for name, parameter in model.get_submodule(around)._parameters.items():
            count = parameter.shape[0] if parameter is not None and parameter.dim() else 0
            if parameter is not None and 1 < count == parameter.numel() < width and count % parts == 0 and width % count == 0:
                found[pattern_of(f"{around}.{name}" if around else name, model)] = None
    return tuple(found)


def _ways(flow: Flow, group: Iterable[str], model: torch.nn.Module) -> list[Mapping[str, str]]:
    """How outputs of fused layers may be grouped: as the forward takes them apart, and as one."""
    seen: dict[str, str] = {}
    for path in (p for p in group if p not in flow.leaves):  # what is put together again may be cut anywhere
        pattern = pattern_of(path, model)
        if flow.pieces.get(path, 1) > 1:
            seen[pattern] = str(flow.pieces[path])
        elif sizes := flow.sizes.get(path):
            unit = math.gcd(*sizes)
            seen[pattern] = "[" + ",".join(str(n // unit) for n in sizes) + "]"
    return [seen, {}] if seen else [{}]


def add_layers(
    plan: Plan, flow: Flow, paths: Iterable[str], axis: str, model: torch.nn.Module, blocks: Mapping[str, str] | None = None, heads: Iterable[str] = ()
) -> None:
    """Rules for layers, by what they feed.

    Args:
        plan: gets the rules.
        flow: of the model.
        paths: of layers.
        axis: that cuts them.
        model: has them.
        blocks: pattern → groups of fused outputs, each of which is cut: "3", or sizes in proportion: "[4,2,2]".
        heads: patterns of parameters that are cut along their first dimension.
    """
    one_of = {pattern_of(path, model): path for path in paths}
    alike: dict[tuple[str, tuple[tuple[str, Any], ...]], list[str]] = {}
    for pattern, path in one_of.items():
        style, options = _style(flow, path, (blocks or {}).get(pattern, 1))
        alike.setdefault((style, tuple(options.items())), []).append(pattern)
    for (name, given), patterns in alike.items():
        plan.style(name, joined(patterns), axis, **dict(given))
    meant = {path for path in flow.layers if pattern_of(path, model) in one_of}
    waiting = dict.fromkeys(pattern_of(name, model) for name, feeders in flow.waiting.items() if feeders & meant)
    for pattern in heads:
        plan.add(ParamRule(pattern, plan.rule({axis: 0})))
    if new := [pattern for pattern in waiting if pattern not in heads and not any(rule.path == pattern for rule in plan.pendings)]:
        plan.pending(joined(new), axis)


def _style(flow: Flow, path: str, blocks: int | str) -> tuple[str, dict[str, Any]]:
    """A style for a layer, and what differs from its defaults."""
    layer = flow.layers[path]
    options: dict[str, Any] = {"transposed": True} if layer.transposed else {}
    if layer.kind == "table":
        return "vocab", {}
    if flow.feeds.get(path):
        return "rowwise", options | {"bias": layer.bias}
    return "colwise", options | ({"gather": True} if path in flow.leaves else {}) | ({} if blocks == 1 else {"blocks": blocks})


def tie(plan: Plan, model: torch.nn.Module) -> None:
    """A parameter under another name lies as under the name of which the plan speaks."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if plan.param_layout(name) is not None:
            first.setdefault(id(parameter), name)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.get(id(parameter))
        if known is not None and plan.param_layout(name) is None:
            rule = next(r for r in plan.matching("param", known) if isinstance(r, ParamRule))
            plan.add(ParamRule(pattern_of(name, model), rule.rule))
