"""`fully_shard` (FSDP2): units, mesh, its arguments, and the switches of `FSDPModule`, read off the class."""

from __future__ import annotations

import inspect
from typing import ClassVar

from torch.distributed.fsdp import FSDPModule

from proctor.oracle.fuzz.axes import OfWrapper, Rule, Wrapper, register, register_wrapper
from proctor.oracle.fuzz.axes.draft import Draft
from proctor.oracle.fuzz.space import Choice, Point

WRAPPERS = ("fsdp2", "hsdp", "tp_fsdp2", "replicate", "spmd")
# Switches that say something else than how: they leave gradients unreduced, or belong to a step's last microbatch.
MEANING = {
    "set_requires_gradient_sync": "gradients are not reduced; `sync` sets it",
    "set_requires_all_reduce": "gradients are not reduced over replicas",
    "set_is_last_backward": "it says that more backward passes follow",
    "set_reshard_after_backward(False)": "parameters stay gathered, so that the next forward pass would not see the update",
    "set_unshard_in_backward": "parameters that the backward pass needs are not gathered",
}


def switches() -> tuple[str, ...]:
    """Methods of `FSDPModule` that take one switch, as calls with both values."""
    found = []
    for name in dir(FSDPModule):
        if not name.startswith("set_") or name in MEANING:
            continue
        first = [*inspect.signature(getattr(FSDPModule, name)).parameters.values()][1]
        if first.annotation in ("bool", bool):
            found += [f"{name}(True)", f"{name}(False)"]
    return tuple(s for s in found if s not in MEANING)


def shard(draft: Draft, setting: Point, mesh: str, function: str = "fully_shard", more: str = "") -> None:
    """Shard units and root, deal out rows over the mesh; `more` arguments are the wrapper's."""
    draft.add_import(f"from torch.distributed.fsdp import {function}" if function == "fully_shard" else f"from torch.distributed._composable.replicate_with_fsdp import {function}")
    draft.add_import("from torch.distributed.device_mesh import init_device_mesh")
    draft.wrap.append(f"mesh = init_device_mesh('cpu', {mesh})")
    options = "mesh=mesh" + more + "".join(f", {v}" for v in _arguments(draft, setting))
    units = draft.code.units if setting["fsdp_units"] != "root" else ()
    if units and setting["fsdp_units"] == "pairs":
        draft.wrap.append(f"units = [{', '.join(units)}]")
        draft.wrap.append(f"for i in range(0, len(units), 2): {function}(units[i : i + 2], {options})")
    elif units:
        draft.wrap.append(f"for unit in ({', '.join(units)},): {function}(unit, {options})")
    draft.wrap.append(f"{function}(net, {options})")
    if setting["fsdp_set"]:
        draft.wrap.append(f"net.{setting['fsdp_set']}")
    draft.rows, draft.scale = "torch.arange(n).tensor_split(world)[rank]", " * world"


def _arguments(draft: Draft, setting: Point) -> list[str]:
    found = []
    if setting["fsdp_reshard"]:
        found.append(f"reshard_after_forward={setting['fsdp_reshard']}")
    if setting["fsdp_offload"]:
        draft.add_import("from torch.distributed.fsdp import CPUOffloadPolicy")
        found.append("offload_policy=CPUOffloadPolicy(pin_memory=False)")
    if setting["fsdp_policy"]:
        draft.add_import("from torch.distributed.fsdp import MixedPrecisionPolicy")
        found.append(f"mp_policy=MixedPrecisionPolicy({setting['fsdp_policy']})")
    if setting["fsdp_dim"]:
        draft.add_import("from torch.distributed.tensor import Shard")
        found.append("shard_placement_fn=lambda p: Shard(p.ndim - 1)")
    return found


@register_wrapper
class Fsdp2(Wrapper):
    """Parameters, gradients and state cut over all ranks."""

    name: ClassVar[str] = "fsdp2"
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule("invalid", "ranks that call different units wait for one another", when={"wrapper": WRAPPERS, "fsdp_units": ("each", "pairs")}, traits=frozenset({"sometimes unused"})),
        Rule("invalid", "FSDP2 asks for set_reduce_scatter_unused_params where ranks use different parameters", when={"wrapper": WRAPPERS},
             unless={"fsdp_set": ("set_reduce_scatter_unused_params(True)",)}, traits=frozenset({"sometimes unused"})),
        Rule("invalid", "FSDP2 does not shard parameters of no dimension", when={"wrapper": WRAPPERS}, traits=frozenset({"scalar"})),
    )

    def apply(self, draft: Draft, setting: Point) -> None:
        """As `Wrapper.apply`."""
        shard(draft, setting, "(world,)")


@register_wrapper
class Hsdp(Wrapper):
    """Cut over two ranks, replicated over two."""

    name: ClassVar[str] = "hsdp"
    rules: ClassVar[tuple[Rule, ...]] = (Rule("invalid", "a mesh of two by two has four ranks", when={"wrapper": ("hsdp", "tp_fsdp2")}, unless={"world": (4,)}),)

    def apply(self, draft: Draft, setting: Point) -> None:
        """As `Wrapper.apply`."""
        shard(draft, setting, "(2, 2), mesh_dim_names=('replicate', 'shard')")


class _Option(OfWrapper):
    of = WRAPPERS
    absent = "there is no FSDP"


@register
class Units(_Option):
    """The model as one, each unit by itself, or two of them together."""

    choice = Choice("fsdp_units", ("root", "each", "pairs"))


@register
class Reshard(_Option):
    """`reshard_after_forward`."""

    choice = Choice("fsdp_reshard", ("", "True", "False", "2"))
    rules = (Rule("invalid", "the number of ranks is not a multiple", when={"fsdp_reshard": ("2",)}, unless={"world": (4,)}),
             Rule("invalid", "a subgroup has fewer ranks than the mesh", when={"fsdp_reshard": ("2",)}, unless={"wrapper": ("fsdp2",)}),)


@register
class Offload(_Option):
    """`CPUOffloadPolicy`."""

    choice = Choice("fsdp_offload", (False, True), rare=0.3)


@register
class Dim(_Option):
    """`shard_placement_fn`: the last dimension instead of the first."""

    choice = Choice("fsdp_dim", (False, True), rare=0.4)
    rules = (
        *(
            Rule("invalid", "FSDP2 shards other dimensions than the first only evenly", when={"fsdp_dim": (True,), "world": (n,)}, unless={"wrapper": ("hsdp", "tp_fsdp2")},
                 lacks=frozenset({f"divides by {n}"}))
            for n in (2, 3, 4)
        ),
        Rule("invalid", "FSDP2 shards other dimensions than the first only evenly", when={"fsdp_dim": (True,), "wrapper": ("hsdp",)}, lacks=frozenset({"divides by 2"})),
        Rule("invalid", "FSDP2 shards other dimensions than the first only evenly", when={"fsdp_dim": (True,), "wrapper": ("tp_fsdp2",)}, lacks=frozenset({"divides by 4"})),
    )


@register
class Policy(_Option):
    """`MixedPrecisionPolicy`."""

    choice = Choice("fsdp_policy", ("", "reduce_dtype=torch.float32", "param_dtype=torch.bfloat16", "output_dtype=torch.float32"), rare=0.3)
    rules = (
        Rule("invalid", "a unit's output of another precision goes into layers that do not take it", when={"fsdp_policy": ("output_dtype=torch.float32",), "fsdp_units": ("each", "pairs")}),
        Rule("invalid", "FSDP2 does not cast buffers, and spectral norm computes with them", when={"fsdp_policy": ("param_dtype=torch.bfloat16",)}, traits=frozenset({"powers"})),
        Rule("invalid", "FSDP2 does not cast buffers, and batch norm takes none in double precision beside bfloat16", when={"fsdp_policy": ("param_dtype=torch.bfloat16",)},
             unless={"precision": ("float32",)}, traits=frozenset({"local statistics"})),
        Rule("approximate", "gradients are reduced in single precision", when={"fsdp_policy": ("reduce_dtype=torch.float32",)}, tolerance=3e-5),
        Rule("approximate", "the output is in single precision", when={"fsdp_policy": ("output_dtype=torch.float32",)}, tolerance=3e-5),
        Rule("approximate", "the model computes in bfloat16", when={"fsdp_policy": ("param_dtype=torch.bfloat16",)}, tolerance=0.15),
    )


@register
class Switch(_Option):
    """A switch of `FSDPModule`, on the root."""

    choice = Choice("fsdp_set", ("", *switches()), rare=0.6)
    rules = tuple(
        Rule("different", "parameters that no rank used get gradients of zeros instead of none", when={"fsdp_set": ("set_reduce_scatter_unused_params(True)",)},
             traits=frozenset({trait}))
        for trait in ("unused", "sometimes unused")
    )
