"""Tensor parallelism as transformers writes it: the table `base_model_tp_plan` of a model's configuration.

A key is a path with "*" for a number, of a module or a parameter, and a value names a style. The head, of which configurations say nothing, and
the embedding are cut along the vocabulary where that goes (`get_output_embeddings`, `get_input_embeddings`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch

from proctor.errors import OracleError
from proctor.oracle.parallel.deriving.flow import layers_of
from proctor.oracle.parallel.deriving.patterns import glob, joined, pattern_of
from proctor.oracle.plans.names import compiled
from proctor.oracle.plans.plan import Plan
from proctor.oracle.plans.rules import ParamRule


def read(plan: Plan, model: torch.nn.Module, axis: str) -> list[str]:
    """Rules of the tables of a model and of the models in it.

    Returns:
        what is not understood, one line each.

    Raises:
        OracleError: no configuration has a table.
    """
    tables = list(_tables(model))
    if not tables:
        raise OracleError(f"{type(model).__name__} has no tensor-parallel plan: no configuration in it has base_model_tp_plan", hint="--from model finds one from a forward")
    parameters = dict(model.named_parameters())
    names = [*dict(model.named_modules()), *parameters]
    notes = []
    modules: dict[str, list[str]] = {}  # by style, so that layers of a kind are one rule
    for path, table in tables:
        for key, style in table.items():
            pattern = glob(f"{path}.{key}" if path else key)
            found = [name for name in names if compiled(pattern).fullmatch(name)]
            if not found:
                continue  # of a variant of the model: a table is one for all sizes
            if style not in STYLES:
                notes.append(f"{key}: the style {style[:40]!r} has no rules here; what it cuts stays whole")
                continue
            if found[0] in parameters:
                STYLES[style](plan, model, pattern, found, axis)
            else:
                modules.setdefault(style, []).append(pattern)
    for style, patterns in modules.items():
        for having in (True, False):  # rules for a bias are rules for layers that have one
            of = {p: next(n for n in names if compiled(p).fullmatch(n)) for p in patterns}
            if alike := [p for p, name in of.items() if _has_bias(model, [name]) is having]:
                STYLES[style](plan, model, joined(alike), [of[p] for p in alike], axis)
    _vocabulary(plan, model, axis)
    return notes


def _tables(model: torch.nn.Module) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Path of each base model that has a table, with the table."""
    done: set[int] = set()
    for path, module in model.named_modules():
        table = getattr(getattr(module, "config", None), "base_model_tp_plan", None)
        prefix = getattr(module, "base_model_prefix", "")
        if not isinstance(table, Mapping) or not isinstance(prefix, str):
            continue
        base = getattr(module, prefix, None) if prefix else None
        inner = isinstance(base, torch.nn.Module)
        if id(base if inner else module) not in done:
            done.add(id(base if inner else module))
            yield ".".join(filter(None, (path, prefix if inner else ""))), {str(k): str(v) for k, v in table.items()}


def _vocabulary(plan: Plan, model: torch.nn.Module, axis: str) -> None:
    parts = plan.mesh.size(axis)
    names = {id(module): path for path, module in model.named_modules()}
    layers = layers_of(model)
    for ask, style in (("get_input_embeddings", "vocab"), ("get_output_embeddings", "colwise")):
        try:
            module = getattr(model, ask, lambda: None)()
        except (AttributeError, NotImplementedError):  # a model of pictures
            continue
        path = names.get(id(module), "")
        known = layers.get(path)
        if known is None or known.kind != ("table" if style == "vocab" else "linear") or plan.param_layout(f"{path}.weight") is not None:
            continue
        if model.get_submodule(path).weight.shape[0] % parts == 0:
            plan.style(style, pattern_of(path, model), axis, **({} if style == "vocab" else {"gather": True}))


def _shard(plan: Plan, model: torch.nn.Module, names: list[str], axis: str, dim: int, blocks: int = 1) -> None:
    """Parameters that a rule names themselves; `dim` from the end, of those with as many dimensions."""
    for pattern, shape in {pattern_of(name, model): model.get_parameter(name).shape for name in names}.items():
        at = max(len(shape) + dim, 0)
        plan.add(ParamRule(pattern, plan.rule({axis: at if blocks == 1 else f"interleaved:{at}:{blocks}"})))


def _is_parameter(model: torch.nn.Module, names: list[str]) -> bool:
    return names[0] in dict(model.named_parameters())


def _has_bias(model: torch.nn.Module, names: list[str]) -> bool:
    return model.get_submodule(names[0])._parameters.get("bias") is not None


def _colwise(gather: bool = False, blocks: int = 1) -> Style:
    def add(plan: Plan, model: torch.nn.Module, pattern: str, names: list[str], axis: str) -> None:
        if _is_parameter(model, names):
            _shard(plan, model, names, axis, -2, blocks)
        else:
            plan.style("colwise", pattern, axis, gather=gather, blocks=blocks)

    return add


def _rowwise(split: bool = False, blocks: int = 1) -> Style:
    def add(plan: Plan, model: torch.nn.Module, pattern: str, names: list[str], axis: str) -> None:
        if _is_parameter(model, names):
            _shard(plan, model, names, axis, -1, blocks)
            return
        if blocks > 1:
            plan.add(ParamRule(rf"{pattern}\.weight", plan.rule({axis: f"interleaved:1:{blocks}"})))
        if split:
            plan.redistribute(pattern, at="input", dst={axis: -1})
        plan.style("rowwise", pattern, axis, bias=_has_bias(model, names))

    return add


def _embedding_rows(plan: Plan, model: torch.nn.Module, pattern: str, names: list[str], axis: str) -> None:
    plan.style("vocab", pattern, axis)


def _embedding_columns(plan: Plan, model: torch.nn.Module, pattern: str, names: list[str], axis: str) -> None:
    plan.add(ParamRule(rf"{pattern}\.weight", plan.rule({axis: 1}))).redistribute(pattern, at="output", src={axis: -1})


def _waiting(plan: Plan, model: torch.nn.Module, pattern: str, names: list[str], axis: str) -> None:
    path = pattern if _is_parameter(model, names) else rf"{pattern}\.[^.]+"
    plan.pending(path, axis)


def _experts(plan: Plan, model: torch.nn.Module, pattern: str, names: list[str], axis: str) -> None:
    # Hidden states and the weights of the experts, by position or by name; the choice of experts has no gradient.
    plan.redistribute(pattern, at="input", grad_src={axis: "partial"})
    plan.redistribute(pattern, at="output", src={axis: "partial"})


def _sum(plan: Plan, model: torch.nn.Module, pattern: str, names: list[str], axis: str) -> None:
    plan.redistribute(pattern, at="output", src={axis: "partial"})


def _nothing(plan: Plan, model: torch.nn.Module, pattern: str, names: list[str], axis: str) -> None:
    pass


Style = Callable[[Plan, torch.nn.Module, str, list[str], str], None]
STYLES: Final[dict[str, Any]] = {
    "colwise": _colwise(), "colwise_gather_output": _colwise(gather=True), "colwise_rep": _colwise(gather=True), "packed_colwise": _colwise(blocks=2),
    "rowwise": _rowwise(), "rowwise_split_input": _rowwise(split=True), "rowwise_rep": _rowwise(split=True), "packed_rowwise": _rowwise(blocks=2),
    "embedding_rowwise": _embedding_rows, "embedding_colwise": _embedding_columns,
    "moe_tp_experts": _experts, "all_reduce": _sum, "replicated_with_grad_allreduce": _waiting,
    "replicate": _nothing, "local_params": _nothing,
}  # fmt: skip
