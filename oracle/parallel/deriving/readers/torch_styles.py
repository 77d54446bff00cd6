"""Tensor parallelism as `torch.distributed.tensor.parallel` writes it: what each `ParallelStyle` says of a module, as rules of a plan.

The layouts that a style keeps are read (`input_layouts`, `output_layouts`, …); a style of the user's own has none and is named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from proctor.oracle.parallel.deriving.flow import layers_of
from proctor.oracle.parallel.deriving.patterns import pattern_of
from proctor.oracle.plans.mesh import Mesh
from proctor.oracle.plans.placements import layout_of
from proctor.oracle.plans.plan import Plan
from proctor.oracle.plans.rules import ParamRule

Where = dict[str, "int | str"]
_PREPARES: Final = ("input_layouts", "desired_input_layouts", "output_layouts", "desired_output_layouts")


def add_style(plan: Plan, model: torch.nn.Module, path: str, style: Any, axis: str) -> list[str]:
    """The rules of one style on one module; those that the plan has are not added again.

    Returns:
        what is not understood, one line each.
    """
    from torch.distributed.tensor import parallel

    pattern = pattern_of(path, model)
    if isinstance(style, parallel.ColwiseParallel | parallel.RowwiseParallel):
        return _layer(plan, model, path, pattern, style, axis)
    if isinstance(style, parallel.SequenceParallel):
        _once(plan, "sequence", pattern, axis)
        return []
    ends = getattr(style, "prepare_module_input", None), getattr(style, "prepare_module_output", None)
    for one in ends if all(ends) else (style,):
        if isinstance(one, parallel.PrepareModuleInput):
            _inputs(plan, pattern, one, axis)
        elif isinstance(one, parallel.PrepareModuleOutput):
            _ends(plan, pattern, "output", one.output_layouts, one.desired_output_layouts, axis)
        else:
            return [f"{path}: {type(style).__name__} is no style of torch, so what it does is not known"]
    return []


def _once(plan: Plan, style: str, pattern: str, axis: str, **options: Any) -> None:
    """A style for a pattern, the first time."""
    if not any(rule.path.startswith(rf"{pattern}\.") for rule in plan.params):
        plan.style(style, pattern, axis, **options)


def _layer(plan: Plan, model: torch.nn.Module, path: str, pattern: str, style: Any, axis: str) -> list[str]:
    from torch.distributed.tensor.parallel import ColwiseParallel

    layer = layers_of(model).get(path)
    if layer is None or layer.transposed:
        return [f"{path}: {type(style).__name__} is about a linear layer or an embedding, and it is {type(model.get_submodule(path)).__name__}"]
    before, after = _where(style.input_layouts[0], axis), _where(style.output_layouts[0], axis)
    if plan.param_layout(f"{path}.weight") is not None:
        return []
    table, outputs = layer.kind == "table", isinstance(style, ColwiseParallel)
    if table and outputs:
        _cut(plan, rf"{pattern}\.weight", axis, 1)
    if outputs:
        if not table:
            _cut(plan, rf"{pattern}\.(weight|bias)", axis, 0)
            plan.redistribute(pattern, at="input", src=before, dst={}, grad_src={axis: "partial"}, grad_dst=before)
        if after != {axis: -1}:
            plan.redistribute(pattern, at="output", src={axis: -1}, dst=after)
        return []
    sequence = after.get(axis)
    if isinstance(sequence, str):
        return [f"{path}: its output is to stay an addend, for which there is no rule"]
    if table:
        plan.style("vocab", pattern, axis, sequence=sequence)
    else:
        if not before:
            plan.redistribute(pattern, at="input", dst={axis: -1})
        plan.style("rowwise", pattern, axis, sequence=sequence, bias=layer.bias)
    return []


def _cut(plan: Plan, path: str, axis: str, dim: int) -> None:
    plan.add(ParamRule(path, plan.rule({axis: dim})))


def _inputs(plan: Plan, pattern: str, style: Any, axis: str) -> None:
    _ends(plan, pattern, "input", style.input_layouts or (), style.desired_input_layouts or (), axis)
    named = style.input_kwarg_layouts or {}, style.desired_input_kwarg_layouts or {}
    for key, layout in named[0].items():
        _edge(plan, pattern, "input", str(key), layout, named[1].get(key), axis)


def _ends(plan: Plan, pattern: str, at: str, here: Sequence[Any], there: Sequence[Any], axis: str) -> None:
    for i, (layout, desired) in enumerate(zip(here, there)):
        # A single output has no place of its own.
        _edge(plan, pattern, at, f"{i}" if at == "input" or len(here) > 1 else ".*", layout, desired, axis)


def _edge(plan: Plan, pattern: str, at: str, slot: str, layout: Any, desired: Any, axis: str) -> None:
    if layout is None or desired is None:
        return
    before, after = _where(layout, axis), _where(desired, axis)
    known = any(rule.module == pattern and rule.at == at and rule.slot == slot for rule in plan.edges)
    if before != after and not known:
        plan.redistribute(pattern, at=at, src=before, dst=after, slot=slot)


def _where(placement: Any, axis: str) -> Where:
    """A placement as a plan writes it."""
    layout = layout_of(Mesh((axis,), (2,)), [str(placement)])
    if not layout.cuts:
        return {}
    cut = layout.cuts[0]
    return {axis: cut.strategy if cut.reduction else cut.dim}


def counted(model: torch.nn.Module, before: Mapping[str, Mapping[str, int]], parts: int) -> list[tuple[str, str]]:
    """Whole numbers of modules that a program divided by the number of ranks: pattern and name.

    Args:
        model: afterwards.
        before: as `whole_numbers` gave it.
        parts: ranks.
    """
    found: dict[tuple[str, str], None] = {}
    for path, values in whole_numbers(model).items():
        for name, value in values.items():
            was = before.get(path, {}).get(name, value)
            if was != value and value * parts == was:
                found[pattern_of(path, model), name] = None
    return list(found)


def whole_numbers(model: torch.nn.Module) -> dict[str, dict[str, int]]:
    """By path of the module and name."""
    return {path: {k: v for k, v in vars(module).items() if type(v) is int} for path, module in model.named_modules()}
