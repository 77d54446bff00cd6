"""Tensor parallelism: `parallelize_module` with the library's styles, alone or with FSDP2 on a mesh of two dimensions."""

from __future__ import annotations

import re
from typing import ClassVar

from proctor.oracle.fuzz.axes import Axis, Rule, Wrapper, register, register_wrapper
from proctor.oracle.fuzz.axes.draft import Draft
from proctor.oracle.fuzz.axes.fsdp2 import shard
from proctor.oracle.fuzz.space import Choice, Point, Value

WRAPPERS = ("tp", "tp_fsdp2")
_STYLES = {
    "column": "ColwiseParallel(output_layouts=Replicate())",
    "row": "RowwiseParallel(input_layouts=Replicate())",
}

# What works on all parameters in one call.
_TOGETHER: tuple[dict[str, tuple[Value, ...]], ...] = (
    {"clip": ("2", "inf", "1", "0.5", "0")},
    {"clip_foreach": ("True",)},
    {"implementation": ("foreach=True", "fused=True")},
    {"optimizer": ("LBFGS",)},
)


def plan(draft: Draft, style: str) -> dict[str, str]:
    """Name of a module → its style; "" is the whole model."""
    if style == "sequence":
        return draft.code.sequence
    found: dict[str, str] = {}
    paired = {name for pair in draft.code.pairs for name in pair}
    for up, down in draft.code.pairs if style == "pairs" else ():
        found |= {up: "ColwiseParallel()", down: "RowwiseParallel()"}
    for name in draft.code.tensor_parallel:
        if style != "pairs" or name not in paired:
            found[name] = _STYLES["row" if style == "row" else "column"]
    return found


def parallelize(draft: Draft, setting: Point, mesh: str) -> None:
    """Cut what can be cut."""
    found = plan(draft, str(setting["tp_style"]))
    used = {word for style in found.values() for word in re.findall(r"\w+(?=\()", style)}
    draft.add_import(f"from torch.distributed.tensor.parallel import {', '.join([*sorted(used - {'Replicate', 'Shard'}), 'parallelize_module'])}")
    if placements := used & {"Replicate", "Shard"}:
        draft.add_import(f"from torch.distributed.tensor import {', '.join(sorted(placements))}")
    styles = ", ".join(f"'{name}': {style}" for name, style in found.items() if name)
    draft.wrap.append(f"parallelize_module(net, {mesh}, {{{styles}}})")
    if "" in found:
        draft.wrap.append(f"parallelize_module(net, {mesh}, {found['']})")


@register_wrapper
class TensorParallel(Wrapper):
    """Linear layers and embeddings cut over all ranks; each rank has all rows."""

    name: ClassVar[str] = "tp"
    rules: ClassVar[tuple[Rule, ...]] = (
        *(
            Rule("invalid", "one call over parameters of which only some are cut, which the library refuses", when={"wrapper": WRAPPERS, **when}, unless={"tp_style": ("sequence",)}, lacks=frozenset({"wholly cut"}))
            for when in _TOGETHER
        ),
        *(
            Rule("invalid", "one call over parameters on meshes of one and of two dimensions, which the library refuses", when={"wrapper": ("tp_fsdp2",), **when})
            for when in _TOGETHER
        ),
    )

    def apply(self, draft: Draft, setting: Point) -> None:
        """As `Wrapper.apply`."""
        draft.add_import("from torch.distributed.device_mesh import init_device_mesh")
        draft.wrap.append("mesh = init_device_mesh('cpu', (world,))")
        parallelize(draft, setting, "mesh")


@register_wrapper
class TensorParallelFsdp2(Wrapper):
    """Tensor parallelism over two ranks, FSDP2 over two."""

    name: ClassVar[str] = "tp_fsdp2"

    def apply(self, draft: Draft, setting: Point) -> None:
        """As `Wrapper.apply`."""
        draft.add_import("from torch.distributed.device_mesh import init_device_mesh")
        draft.wrap.append("both = init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))")
        parallelize(draft, setting, "both['tp']")
        before = len(draft.wrap)
        shard(draft, setting, "")
        draft.wrap[before] = "mesh = both['dp']"
        draft.rows, draft.scale = "torch.arange(n).tensor_split(2)[rank // 2]", " * 2"


@register
class Style(Axis):
    """Which dimension of a layer is cut; "sequence" is pairs, between which rows or tokens are cut, as are norms."""

    choice = Choice("tp_style", ("column", "row", "pairs", "sequence"))
    order = 35
    rules = (
        Rule("invalid", "there is no tensor parallelism", unless={"tp_style": ("column",), "wrapper": WRAPPERS}),
        Rule("invalid", "no style of the library covers one of the layers", when={"tp_style": ("sequence",)}, lacks=frozenset({"sequence"})),
        Rule("invalid", "the ranks do not divide the rows, and styles take the parts of ranks for alike", when={"tp_style": ("sequence",)}, unless={"split": ("even",)}),
    )

    def invalid(self, value: Value, setting: Point, traits: frozenset[str]) -> str:
        """As `Axis.invalid`: `DTensor.from_local`, by which the styles read a rank's part, takes all parts for alike."""
        size = {word: int(n) for word, n in (t.rsplit(" ", 1) for t in traits if t.startswith(("rows ", "tokens ")))}
        if value != "sequence" or not size:
            return ""
        pairs = setting["wrapper"] == "tp_fsdp2"
        ranks, parts = 2 if pairs else int(str(setting["world"])), (2 if pairs else 1) * int(str(setting["accumulate"]))
        whole = size["tokens"] % ranks == 0 if "tokens" in size else size["rows"] % (ranks * parts) == 0
        return "" if whole else "the ranks do not divide what is cut, and styles take the parts of ranks for alike"

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """Nothing: the wrapper reads it."""
