"""Megatron-core: where a rank is, what its modules are called in the model that is not cut, and what each rank holds.

Everything is read from Megatron's own state: process groups, `layer_number`, `tensor_model_parallel`, `partition_dim`,
`partition_stride`, and the ranges of the distributed optimizer. Nothing is imported: the functions look for
Megatron among the modules that are there. Read with 0.16.1 (`tests/integration/oracle/test_megatron.py`).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from proctor.oracle.plans.mesh import Layout, Mesh
from proctor.oracle.plans.placements import from_megatron

STATE: Final = "megatron.core.parallel_state"
OPTIMIZERS: Final = "megatron.core.optimizer.optimizer"
WRAPPERS: Final = ("_BaseDataParallel", "DistributedDataParallel", "Float16Module")
_NUMBERED: Final = re.compile(r"(weight|bias)(\d+)")


class Part(NamedTuple):
    """The part of one parameter that this rank's optimizer owns.

    Args:
        name: canonical name of the parameter.
        start: first element of the flattened local parameter.
        stop: after the last; `numel` of the local parameter where the optimizer is not distributed.
        tensor: shape (stop - start,), a view.
        slot: of an optimizer state (`exp_avg`), "" for gradients; `main_param` is the copy in higher precision.
        whole: whether it is the whole local parameter.
    """

    name: str
    start: int
    stop: int
    tensor: Any
    slot: str = ""
    whole: bool = True


def present() -> bool:
    """Whether the program has Megatron-core and has set up its process groups."""
    state = sys.modules.get(STATE)
    return state is not None and bool(state.model_parallel_is_initialized())


def is_model(root: Any) -> bool:
    """Whether a module is Megatron's, or a wrapper of one."""
    return any(is_kind(module, "MegatronModule") for module in (root, unwrapped(root)))


def unwrapped(root: Any) -> Any:
    """The model inside Megatron's data parallel and half precision wrappers."""
    while any(is_kind(root, wrapper) for wrapper in WRAPPERS) and hasattr(root, "module"):
        root = root.module
    return root


# ── where this rank is ──────────────────────────────────────────────────────────────────────────────────────────


def mesh() -> Mesh:
    """The axes pp, dp, cp and tp of this job, slow → fast as Megatron ordered its ranks.

    Expert parallelism is no axis: an expert is known by its number in the whole model, and the ranks that hold it replicate it.
    Where experts are cut by fewer ranks than other weights are, tp is two axes, `tp_outer` and `etp`.
    """
    sizes = {axis: size for axis, _, size, _ in _axes()}
    return Mesh(tuple(sizes), tuple(sizes.values()))


def coords() -> dict[str, int]:
    """This rank's place on `mesh()`."""
    return {axis: at for axis, _, _, at in _axes()}


def reference_call(call: int) -> int:
    """Which micro batch of the reference is this rank's `call`-th: data parallel ranks take turns.

    Source: `MegatronPretrainingSampler`, which deals out slices of micro batch size × data parallel size.
    """
    group = sys.modules[STATE].get_data_parallel_group()
    return call * int(group.size()) + int(group.rank())


def _axes() -> list[tuple[str, int, int, int]]:
    """(name, distance of neighbours in ranks, size, place of this rank) of every axis, slow → fast."""
    state = sys.modules[STATE]
    groups = {
        "pp": state.get_pipeline_model_parallel_group(),
        "dp": state.get_data_parallel_group(),
        "cp": state.get_context_parallel_group(),
        "tp": state.get_tensor_model_parallel_group(),
    }
    found = [(axis, _distance(group), int(group.size()), int(group.rank())) for axis, group in groups.items()]
    experts = _expert_cut(int(groups["tp"].size()))
    if experts:
        _, distance, size, at = found.pop()
        found += [
            ("tp_outer", distance * experts, size // experts, at // experts),
            ("etp", distance, experts, at % experts),
        ]
    # Axes of size 1 have no distance; they stay in Megatron's usual order, among the fast ones.
    return sorted(found, key=lambda axis: -axis[1])


def _distance(group: Any) -> int:
    ranks = sys.modules["torch.distributed"].get_process_group_ranks(group)
    return int(ranks[1] - ranks[0]) if len(ranks) > 1 else 0


def _expert_cut(tp: int) -> int:
    """How many ranks cut an expert's weights, where that is neither none nor all of the tensor parallel ones; else 0."""
    size = getattr(sys.modules[STATE], "get_expert_tensor_parallel_world_size", lambda: tp)()
    return int(size) if size and 1 < size < tp and tp % size == 0 else 0


# ── names ───────────────────────────────────────────────────────────────────────────────────────────────────────


def canonical_names(root: Any) -> dict[str, str]:
    """Names in the model that is not cut, by path below `root`, of all modules and parameters.

    Layers are counted over pipeline and virtual stages (`layer_number`), experts over expert parallel ranks; wrappers are left
    out; the last stage's copy of a tied embedding has the embedding's name.

    Args:
        root: a model chunk, wrapped or not.
    """
    model = unwrapped(root)
    prefix = "" if model is root else next((f"{path}." for path, module in root.named_modules() if module is model), "")
    names: dict[str, str] = {"": ""}
    for path, module in model.named_modules():
        if path:
            parent, _, leaf = path.rpartition(".")
            names[path] = _join(names[parent], _counted(model, parent, module, leaf) if leaf.isdigit() else leaf)
    for path, module in list(model.named_modules()):
        for leaf, _ in module.named_parameters(recurse=False):
            names[_join(path, leaf)] = _join(names[path], _numbered(module, leaf))
    if getattr(model, "share_embeddings_and_output_weights", False) and "output_layer.weight" in names:
        names["output_layer.weight"] = "embedding.word_embeddings.weight"
    wrappers = {path: "" for path, _ in root.named_modules() if len(path) < len(prefix)}
    return {**wrappers, **{(prefix + path).rstrip("."): name for path, name in names.items()}}


def canonical_name(root: Any, path: str) -> str:
    """One of `canonical_names`; the path itself if it is not below `root`."""
    return canonical_names(root).get(path, path)


def parameter_names(roots: Iterable[Any]) -> dict[int, str]:
    """Canonical names by `id` of the parameter."""
    found: dict[int, str] = {}
    for root in roots:
        names = canonical_names(root)
        for path, parameter in root.named_parameters():
            found.setdefault(id(parameter), names[path])
    return found


def _counted(model: Any, parent: str, module: Any, leaf: str) -> str:
    """The number that a layer or an expert has in the whole model."""
    if not is_kind(model.get_submodule(parent), "ModuleList"):
        return leaf
    layer = getattr(module, "layer_number", None)
    if isinstance(layer, int):
        return str(layer - 1)
    owner, _, name = parent.rpartition(".")
    experts = getattr(model.get_submodule(owner), "num_local_experts", None)
    if name == "local_experts" and isinstance(experts, int):
        return str(int(leaf) + experts * _expert_rank())
    return leaf


def _numbered(module: Any, leaf: str) -> str:
    """`weight3` of grouped experts, counted over expert parallel ranks (TransformerEngine's GroupedLinear)."""
    match = _NUMBERED.fullmatch(leaf)
    count = getattr(module, "num_gemms", None)
    if match and isinstance(count, int):
        return f"{match[1]}{int(match[2]) + count * _expert_rank()}"
    return leaf


def _expert_rank() -> int:
    return int(sys.modules[STATE].get_expert_model_parallel_rank() or 0)


# ── parameters ──────────────────────────────────────────────────────────────────────────────────────────────────


def layout_of(parameter: Any, owner: Any = None) -> Layout | None:
    """How a parameter lies on `mesh()`.

    Args:
        parameter: with Megatron's attributes; without them it is replicated.
        owner: the module it belongs to, which tells an expert's weight where there is one expert parallel rank.

    Returns:
        None for a fused weight of several experts (`GroupedMLP`), which is cut by expert as well.
    """
    if not getattr(parameter, "tensor_model_parallel", False):
        return Layout()
    dim, stride = int(parameter.partition_dim), int(getattr(parameter, "partition_stride", 1))
    if owner is not None and is_kind(owner, "GroupedMLP") and not is_kind(owner, "TEGroupedMLP"):
        return None
    expert = not getattr(parameter, "allreduce", True) or bool(getattr(owner, "is_expert", False))
    axis = cut_axis(expert)
    return from_megatron(bool(axis), dim, stride, axis=axis)


def cut_axis(expert: bool = False) -> str:
    """The axis of `mesh()` that cuts weights; "" where nothing does."""
    axes = [axis for axis, _, _, _ in _axes() if axis in ("tp", "tp_outer", "etp")]
    if len(axes) == 2:
        return "etp" if expert else "tp_outer+etp"
    if expert:
        size = getattr(sys.modules[STATE], "get_expert_tensor_parallel_world_size", lambda: None)()
        return "" if size == 1 else "tp"
    return "tp"


# ── the optimizer ───────────────────────────────────────────────────────────────────────────────────────────────


def optimizer_classes() -> list[type]:
    """Classes of Megatron with a `step` of their own; the outermost call sees gradients before they are clipped.

    Its result is (whether it updated, gradient norm, number of zeros in the gradients).
    """
    module = sys.modules.get(OPTIMIZERS)
    if module is None:
        return []
    found, left = [], [module.MegatronOptimizer]
    while left:
        kind = left.pop()
        left += [k for k in kind.__subclasses__() if k not in found]
        if "step" in vars(kind) and not getattr(vars(kind)["step"], "__isabstractmethod__", False):
            found.append(kind)
    return found


def main_grads(optimizer: Any, roots: Iterable[Any] = ()) -> Iterator[Part]:
    """Reduced gradients, as far as this rank's optimizer owns them.

    With the distributed optimizer `main_grad` holds a valid value only in this rank's flat shard of every bucket.

    Args:
        optimizer: of Megatron, plain or chained, before its `step`: clipping changes the gradients in place.
        roots: the model chunks; not needed where the optimizer knows them (the distributed one does).
    """
    names = parameter_names([*roots, *getattr(optimizer, "model_chunks", ())])
    for inner in _chained(optimizer):
        for parameter, start, stop in _owned(inner):
            grad = getattr(parameter, "main_grad", None)
            grad = parameter.grad if grad is None else grad
            if grad is not None:
                yield _part(names, parameter, start, stop, grad.reshape(-1)[start:stop], "")


def optimizer_state(optimizer: Any, roots: Iterable[Any] = ()) -> Iterator[Part]:
    """Moments and the parameters in higher precision, as far as this rank's optimizer owns them.

    Args:
        optimizer: as for `main_grads`.
        roots: as for `main_grads`.
    """
    names = parameter_names([*roots, *getattr(optimizer, "model_chunks", ())])
    for inner in _chained(optimizer):
        for parameter, start, stop in _owned(inner):
            main = _main_parameter(inner, parameter)
            if main is None:
                continue
            state: Mapping[str, Any] = inner.optimizer.state.get(main, {})
            values = {slot: value for slot, value in state.items() if getattr(value, "numel", int)() == stop - start}
            if main.dtype != parameter.dtype:
                values["main_param"] = main.detach()
            for slot, value in values.items():
                yield _part(names, parameter, start, stop, value.reshape(-1), str(slot))


def _part(names: Mapping[int, str], parameter: Any, start: int, stop: int, tensor: Any, slot: str) -> Part:
    name = names.get(id(parameter), "")
    return Part(name, start, stop, tensor, slot, whole=stop - start == parameter.numel())


def _chained(optimizer: Any) -> list[Any]:
    """The optimizers of a chain (dense and expert parameters), those without parameters left out."""
    inner = getattr(optimizer, "chained_optimizers", None)
    found = [optimizer] if inner is None else [one for each in inner for one in _chained(each)]
    return [one for one in found if not getattr(one, "is_stub_optimizer", False)]


def _owned(optimizer: Any) -> Iterator[tuple[Any, int, int]]:
    """The model's parameters that an optimizer updates here, and which of their elements."""
    if hasattr(optimizer, "gbuf_ranges"):
        for ranges in optimizer.gbuf_ranges:
            for buckets in ranges.values():
                for bucket in buckets:
                    for parameter, held in bucket["param_map"].items():
                        yield parameter, int(held["param"].start), int(held["param"].end)
        return
    if hasattr(optimizer, "float16_groups"):
        groups = [*optimizer.float16_groups, *optimizer.fp32_from_fp32_groups]
    else:
        groups = [group["params"] for group in optimizer.optimizer.param_groups]
    for group in groups:
        for parameter in group:
            yield parameter, 0, int(parameter.numel())


def _main_parameter(optimizer: Any, parameter: Any) -> Any:
    """What the inner optimizer updates in place of a parameter of the model."""
    if hasattr(optimizer, "model_param_group_index_map"):
        group, at = optimizer.model_param_group_index_map[parameter]
        return optimizer.optimizer.param_groups[group]["params"][at]
    return getattr(parameter, "main_param", parameter)


def is_kind(value: Any, name: str) -> bool:
    """Whether a value is of a class of that name, or of one that derives from it."""
    return any(kind.__name__ == name for kind in type(value).__mro__)


def _join(parent: str, leaf: str) -> str:
    return f"{parent}.{leaf}" if parent and leaf else parent or leaf
