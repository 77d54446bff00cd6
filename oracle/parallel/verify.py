"""Can this plan work for this model? Asked before anything is changed, by `parallelize` and by `proctor oracle plan --model`.

Every answer is one line: a rule that matches nothing, an axis that the mesh lacks, a dimension that cannot be divided, an
addend that nobody reduces, an edge that takes a layer's output for something else than its weights make it, parameters that
see different data and whose gradients nobody reduces. What needs values (two edges that meet in the program's own code, a
gradient that lacks an addend) is looked at in the first step (`edges`, `parameters`). What layers do is known for linear
layers and embeddings (`LINEAR`, `TABLE`); of other modules with cut parameters nothing is said.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Final

import torch

from proctor.errors import MappingError, OracleError
from proctor.oracle.parallel.factories import NAMES
from proctor.oracle.parallel.parameters import shapes_of
from proctor.oracle.parallel.staged.pipeline import unit_of, units_of
from proctor.oracle.plans.mesh import Cut, Layout
from proctor.oracle.plans.names import compiled
from proctor.oracle.plans.plan import Plan
from proctor.oracle.plans.rules import EdgeRule

# Class name → dimension of the weight that outputs are counted along; the other one is that of inputs.
LINEAR: Final = {"Linear": 0, "NonDynamicallyQuantizableLinear": 0, "Conv1D": 1}
TABLE: Final = ("Embedding",)
_SHOWN: Final = 3


def refuse(problems: Sequence[str]) -> None:
    """Raise the first problem, and say how many more there are.

    Raises:
        OracleError: there is one.
    """
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise OracleError(f"the plan cannot work: {problems[0]}{more}", hint="proctor oracle plan PLAN --model FILE.py::function shows all")


def problems(plan: Plan, model: torch.nn.Module) -> list[str]:
    """What is wrong, one line each; nothing when the plan can work as far as is known."""
    return [*_axes(plan), *_idle(plan, model), *_division(plan, model), *_ties(plan, model), *_layers(plan, model), *_data(plan, model), *_sharded(plan, model), *_staged(plan, model)]


def _axes(plan: Plan) -> Iterable[str]:
    """Axes that the mesh does not have."""
    for what, axes in _named_axes(plan):
        for axis in axes:
            for name in axis.split("+"):
                if name not in plan.mesh.axes:
                    close = difflib.get_close_matches(name, plan.mesh.axes, 1)
                    yield f"{what}: the mesh ({plan.mesh}) has no axis {name!r}{f'; did you mean {close[0]!r}?' if close else ''}"


def _named_axes(plan: Plan) -> Iterable[tuple[str, Sequence[str]]]:
    for param in plan.params:
        yield f"param {param.path!r}", [cut.axis for cut in param.rule.cuts]
    for edge in plan.edges:
        axes = [cut.axis for rule in edge.rules.values() for cut in rule.cuts]
        yield f"redistribute {edge.module!r}", list(dict.fromkeys([*axes, *([edge.lookup] if edge.lookup else [])]))
    for pending in plan.pendings:
        yield f"pending {pending.path!r}", pending.axes
    for draw in plan.draws:
        yield f"draw {draw.module!r}", [cut.axis for cut in draw.rule.cuts]
    for factory in plan.factories:
        yield f"factory {factory.module!r}", [cut.axis for cut in factory.rule.cuts]
    for size in plan.sizes:
        yield f"size {size.module!r}", [size.axis]
    for shard in plan.shards:
        yield f"fully_shard {shard.module!r}", [shard.axis]
    for line in plan.pipelines:
        yield "pipeline", [line.axis]


def _idle(plan: Plan, model: torch.nn.Module) -> Iterable[str]:
    """Rules that match nothing."""
    modules, names = [path for path, _ in model.named_modules()], list(shapes_of(model))
    # A bias that a layer does not have is no mistake: its weight says that the layer is meant.
    for kind, patterns, known in (
        ("param", [r.path for r in plan.params if not _of_absent_bias(r.path, names)], names),
        ("pending", [r.path for r in plan.pendings], names),
        ("redistribute", [r.module for r in plan.edges], modules),
        ("draw", [r.module for r in plan.draws], modules),
        ("factory", [r.module for r in plan.factories], modules),
        ("size", [r.module for r in plan.sizes], modules),
        ("fully_shard", [r.module for r in plan.shards], modules),
        ("pipeline", [pattern for r in plan.pipelines for pattern in r.stages], modules),
    ):
        for pattern in dict.fromkeys(patterns):
            if not any(compiled(pattern).fullmatch(name) for name in known):
                close = difflib.get_close_matches(pattern.replace("\\", ""), known, 1, 0.4)
                yield f"{kind} {pattern!r} matches nothing{f'; there is {close[0]!r}' if close else ''}"


    for made in plan.factories:
        for name in (n for n in made.names if n not in NAMES):
            close = difflib.get_close_matches(name, NAMES, 1)
            yield f"factory {made.module!r}: {name!r} is no function that makes tensors{f'; did you mean {close[0]!r}?' if close else ''}"


def _of_absent_bias(pattern: str, names: Sequence[str]) -> bool:
    if not pattern.endswith(r"\.bias"):
        return False
    weight = compiled(pattern.removesuffix("bias") + "weight")
    return any(weight.fullmatch(name) for name in names)


def _division(plan: Plan, model: torch.nn.Module) -> Iterable[str]:
    """Dimensions and attributes that the axes cannot divide."""
    for name, shape in shapes_of(model).items():
        layout = plan.param_layout(name)
        if layout is None:
            continue
        try:
            dims = layout.by_dim(len(shape))
        except MappingError as error:
            yield f"{name} {list(shape)}: {error.message}"
            continue
        for dim, cuts in dims.items():
            parts = 1
            for cut in cuts:
                parts *= plan.mesh.size(cut.axis) * _groups(cut)
            if shape[dim] % parts:
                axes = ", ".join(str(cut) for cut in cuts)
                yield f"{name} {list(shape)}: dimension {dim} of {shape[dim]} is not divisible by {parts} ({axes})"
    for path, module in model.named_modules():
        for rule in plan.sizes:
            if compiled(rule.module).fullmatch(path):
                yield from _sizes(plan, path, module, rule.names, rule.axis)


def _groups(cut: Cut) -> int:
    return cut.options[0] if cut.strategy == "interleaved" and len(cut.options) == 1 else 1


def _sizes(plan: Plan, path: str, module: torch.nn.Module, names: Sequence[str], axis: str) -> Iterable[str]:
    if not all(name in plan.mesh.axes for name in axis.split("+")):
        return
    size = plan.mesh.size(axis)
    for name in names:
        value = getattr(module, name, None)
        if type(value) is not int:
            yield f"size: {path}.{name} is {'missing' if value is None else f'{value!r:.40}, no whole number'}"
        elif value % size:
            yield f"size: {path}.{name} = {value} is not divisible by {axis}={size}"


def _ties(plan: Plan, model: torch.nn.Module) -> Iterable[str]:
    """One parameter under two names that the plan cuts in two ways."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        here, there = (plan.param_layout(n) or Layout() for n in (name, other))
        if here != there:
            yield f"{name} and {other} are one parameter, and the plan cuts it as ({here}) and as ({there})"


def _layers(plan: Plan, model: torch.nn.Module) -> Iterable[str]:
    """What cut weights make of a layer's output and of its input's gradient, and whether the edges know it."""
    for path, module in model.named_modules():
        kind = next((c.__name__ for c in type(module).__mro__ if c.__name__ in LINEAR or c.__name__ in TABLE), "")
        layout = plan.param_layout(f"{path}.weight" if path else "weight")
        if not kind or layout is None:
            continue
        for cut in layout.cuts:
            if cut.reduction or not _shared(plan, cut.axis):
                continue
            dim = cut.dim % 2
            if kind in TABLE:
                yield from _table(plan, path, module, cut, dim)
            elif dim == LINEAR[kind]:
                yield from _outputs_cut(plan, path, cut)
            else:
                yield from _inputs_cut(plan, path, module, cut)


def _table(plan: Plan, path: str, module: torch.nn.Module, cut: Cut, dim: int) -> Iterable[str]:
    # What looks at a whole row, or counts how often a token comes, would look at a part, or at other ranks' tokens.
    for option in ("max_norm", "scale_grad_by_freq"):
        if getattr(module, option, None):
            yield f"{path}: {option} needs the whole table, and it is cut over {cut.axis}"
    if dim == 0 and cut.strategy != "chunk":
        yield f"{path}: rows that are cut {cut} are no block of neighbours, so they cannot be looked up"
    if dim == 1:
        yield from _leaves_as(plan, path, cut, Cut(cut.axis, cut.strategy, -1, cut.options))
        return
    if not any(edge.lookup == cut.axis for edge in _edges(plan, path, "input")):
        yield f"{path}: its rows are cut over {cut.axis} and no rule looks tokens up: redistribute with lookup = {cut.axis!r}"
    yield from _reduced(plan, path, cut.axis)


def _outputs_cut(plan: Plan, path: str, cut: Cut) -> Iterable[str]:
    if not _reduces(plan, path, "input", "grad_from", cut.axis):
        yield (
            f"{path}: its outputs are cut over {cut.axis}, so its input's gradient is an addend that nobody reduces: "
            f"an input edge there or above needs grad_from = {{ {cut.axis} = \"partial\" }}"
        )
    yield from _leaves_as(plan, path, cut, Cut(cut.axis, cut.strategy, -1, cut.options))


def _inputs_cut(plan: Plan, path: str, module: torch.nn.Module, cut: Cut) -> Iterable[str]:
    yield from _reduced(plan, path, cut.axis)
    has_bias = isinstance(getattr(module, "bias", None), torch.nn.Parameter)
    if has_bias and not any(edge.after == "bias" for edge in _edges(plan, path, "output")):
        yield f"{path}: its bias is added by each of the {plan.mesh.size(cut.axis)} ranks along {cut.axis}: after = \"bias\" adds it once"


def _reduced(plan: Plan, path: str, axis: str) -> Iterable[str]:
    if not _reduces(plan, path, "output", "from", axis):
        yield f"{path}: its output is an addend over {axis} that nobody reduces: an output edge there or above needs from = {{ {axis} = \"partial\" }}"
    for edge in _edges(plan, path, "output"):
        said = _along(plan, edge, "from", axis)
        if said is not None and not said.reduction:
            yield f"{path}: its output is an addend over {axis}, and its edge takes it for {said}"


def _leaves_as(plan: Plan, path: str, cut: Cut, made: Cut) -> Iterable[str]:
    """An output edge of a layer whose outputs are cut says so, if it says anything of the axis."""
    for edge in _edges(plan, path, "output"):
        said = _along(plan, edge, "from", cut.axis)
        to = _along(plan, edge, "to", cut.axis)
        if said is None and to is None:
            continue
        if said is None or said.reduction or said.strategy != made.strategy or said.options != made.options:
            yield f"{path}: its output is cut over {cut.axis} as {made}, and its edge takes it for {said or 'whole'}"


def _reduces(plan: Plan, path: str, at: str, way: str, axis: str) -> bool:
    """Whether an edge of the module, or of one around it, takes the tensor (or its gradient) for an addend."""
    parts = path.split(".")
    around = [".".join(parts[:n]) for n in range(len(parts), 0, -1)] + [""]
    for one in around:
        for edge in _edges(plan, one, at):
            cut = _along(plan, edge, way, axis)
            if cut is not None and cut.reduction:
                return True
    return False


def _edges(plan: Plan, path: str, at: str) -> list[EdgeRule]:
    return [edge for edge in plan.edges if edge.at == at and compiled(edge.module).fullmatch(path)]


def _along(plan: Plan, edge: EdgeRule, way: str, axis: str) -> Cut | None:
    rule = edge.rules.get(way)
    return next((cut for cut in rule.cuts if cut.axis == axis), None) if rule else None


def _shared(plan: Plan, axis: str) -> bool:
    return all(name in plan.mesh.axes for name in axis.split("+")) and plan.mesh.size(axis) > 1


def _data(plan: Plan, model: torch.nn.Module) -> Iterable[str]:
    """Parameters that all ranks along an axis hold, which see different rows of the model's input."""
    axes = {
        cut.axis
        for edge in _edges(plan, "", "input")
        for way in ("from", "to")
        for cut in (edge.rules[way].cuts if way in edge.rules else ())
        if not cut.reduction and _shared(plan, cut.axis)
    }
    for axis in sorted(axes):
        bad = [
            name
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and not _waits(plan, name, axis) and axis not in _cut_over(plan, name)
        ]
        if bad:
            more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
            yield f"the input is cut over {axis}, so gradients of {', '.join(bad[:_SHOWN])}{more} are addends that nobody reduces: pending over {axis}"


def _waits(plan: Plan, name: str, axis: str) -> bool:
    return any(set(axis.split("+")) <= {n for a in r.axes for n in a.split("+")} for r in plan.pendings if compiled(r.path).fullmatch(name))


def _cut_over(plan: Plan, name: str) -> set[str]:
    layout = plan.param_layout(name)
    return {cut.axis for cut in layout.cuts} if layout else set()


def _sharded(plan: Plan, model: torch.nn.Module) -> Iterable[str]:
    """What `fully_shard` cannot cut, or would reduce otherwise than the plan says."""
    axes = list(dict.fromkeys(rule.axis for rule in plan.shards))
    if len(axes) > 1:
        yield f"fully_shard: over {axes[0]} and over {axes[1]}; give one axis"
    for axis in axes[:1]:
        for name, parameter in model.named_parameters():
            if parameter.dim() == 0:
                yield f"{name}: a single number cannot be cut over {axis} by fully_shard; make it a tensor of one element"
            if axis in _cut_over(plan, name):
                yield f"{name}: the plan cuts it over {axis}, and so would fully_shard"
            if not _waits(plan, name, axis) and parameter.requires_grad:
                yield f"{name}: fully_shard sums its gradient over {axis}, and no pending says so"
        if len({rule.reduce for rule in plan.pendings if axis in rule.axes}) > 1:
            yield f"fully_shard: some gradients are summed over {axis} and others averaged; torch has one way for all"


def _staged(plan: Plan, model: torch.nn.Module) -> Iterable[str]:
    """Stages that are not as many as ranks, parameters of no stage or of two, and what does not go with stages."""
    for one in plan.pipelines[1:]:
        yield f"pipeline: over {plan.pipelines[0].axis} and over {one.axis}; give one"
    for rule in plan.pipelines[:1]:
        units = units_of(model, rule)
        size = plan.mesh.size(rule.axis) if rule.axis in plan.mesh.axes else 1
        if len(rule.stages) % size:
            yield f"pipeline: {len(rule.stages)} stages, and {rule.axis} has {size} ranks"
        if "" in units:
            yield "pipeline: a stage is the model itself; name modules in it"
        for path in units:
            twice = [i for i, pattern in enumerate(rule.stages) if compiled(pattern).fullmatch(path)]
            if len(twice) > 1:
                yield f"pipeline: {path} is of stage {twice[0]} and of stage {twice[1]}"
        for name, _ in model.named_parameters(remove_duplicate=False):
            if unit_of(name, units) is None:
                yield f"pipeline: {name} is in no stage"
        if plan.shards and size > 1:
            yield "pipeline: with fully_shard is not built"
