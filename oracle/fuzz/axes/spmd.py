"""FSDP2 of a model whose parameters are DTensors on one mesh of all ranks (`dp_mesh_dims`): dimensions of data, of replicas, and of tensors."""

from __future__ import annotations

from typing import ClassVar, Final

from proctor.oracle.fuzz.axes import OfWrapper, Rule, Wrapper, register, register_wrapper
from proctor.oracle.fuzz.axes.draft import Draft
from proctor.oracle.fuzz.axes.fsdp2 import shard
from proctor.oracle.fuzz.axes.loop import rows_of
from proctor.oracle.fuzz.space import Choice, Point

# Value → dimensions of the mesh that rows are dealt out over.
_DIMS: Final = {"shard='dp'": 1, "replicate='dp'": 1, "shard='dp', replicate='tp'": 2, "shard='tp', replicate='dp'": 2, "shard=('dp', 'tp')": 2}
# Traits of models that compute with plain tensors alone, or whose DTensors other wrappers look at.
_PLAIN: Final = ("parametrized", "local statistics", "recurrent", "routed", "embedding bag", "attention", "convolution", "operator", "collective", "exchange")
_PLACES: Final = {"no": "", "rows": "Shard(0)", "columns": "Shard(1)"}


@register_wrapper
class Spmd(Wrapper):
    """Two by two ranks; parameters whole on the dimensions of data, cut on the other one where `spmd_cut` says so."""

    name: ClassVar[str] = "spmd"
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule("invalid", "a mesh of two by two has four ranks", when={"wrapper": ("spmd",)}, unless={"world": (4,)}),
        *(Rule("invalid", "not every layer computes with DTensors", when={"wrapper": ("spmd",)}, traits=frozenset({trait})) for trait in _PLAIN),
        Rule("invalid", "the input is a tensor of the program's", when={"wrapper": ("spmd",), "recompute": ("reentrant",)}),
        Rule("invalid", "what is compiled takes plain tensors", when={"wrapper": ("spmd",)}, unless={"compile": ("no",)}),
    )

    def invalid(self, setting: Point, traits: frozenset[str]) -> str:
        """As `Wrapper.invalid`."""
        rows = rows_of(traits)
        parts = 2 ** _DIMS[str(setting["spmd_dims"])] * int(str(setting["accumulate"]))
        return "the ranks do not divide the rows, and DTensors made of parts take these for alike" if rows % parts else ""

    def apply(self, draft: Draft, setting: Point) -> None:
        """As `Wrapper.apply`."""
        dims, placed = str(setting["spmd_dims"]), _PLACES[str(setting["spmd_cut"])]
        draft.add_import("from torch.distributed.fsdp import DataParallelMeshDims")
        draft.add_import("from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor")
        draft.add_import("from torch.distributed.tensor.debug import _clear_sharding_prop_cache")
        draft.prelude.append("_clear_sharding_prop_cache()  # it has meshes of other programs, which are equal and not the same")
        before = len(draft.wrap)
        shard(draft, setting, "(2, 2), mesh_dim_names=('dp', 'tp')", more=f", dp_mesh_dims=DataParallelMeshDims({dims})")
        draft.wrap[before + 1 : before + 1] = [
            "def place(name, module, mesh):",
            "    for key, p in [*module.named_parameters(recurse=False)]:",
            f"        cut = [Replicate(), {placed or 'Replicate()'} if p.ndim == 2 else Replicate()]",
            "        setattr(module, key, nn.Parameter(distribute_tensor(p.detach(), mesh, cut), requires_grad=p.requires_grad))",
            "distribute_module(net, mesh, place)",
        ]
        both = _DIMS[dims] == 2
        at = "[Shard(0), Shard(0)]" if both else "[Shard(0), Replicate()]"
        draft.rows, draft.scale = ("torch.arange(n).tensor_split(4)[rank]", " * 4") if both else ("torch.arange(n).tensor_split(2)[rank // 2]", " * 2")
        draft.before_loop += [f"at, mesh = {at}, next(net.parameters()).device_mesh", "def cut(t): return DTensor.from_local(t, mesh, at, run_check=False)"]
        draft.forward = "net(*(cut(t[part]) for t in x)).redistribute(placements=at).to_local()"


class _Option(OfWrapper):
    of = ("spmd",)
    absent = "parameters are no DTensors of one mesh"


@register
class Dims(_Option):
    """`DataParallelMeshDims`: which dimensions parameters are cut over, and which have replicas."""

    choice = Choice("spmd_dims", tuple(_DIMS))
    rules = tuple(
        Rule("invalid", "parameters have replicas alone: nothing is cut, gathered or scattered", when={"spmd_dims": ("replicate='dp'",)}, unless={axis: (neutral,)})
        for axis, neutral in (("fsdp_dim", False), ("fsdp_set", ""), ("fsdp_reshard", ""), ("fsdp_call", ""))
    )


@register
class Cut(_Option):
    """How matrices are cut over the second dimension of the mesh."""

    choice = Choice("spmd_cut", tuple(_PLACES))
    rules = (Rule("invalid", "the dimension is one of data", unless={"spmd_cut": ("no",), "spmd_dims": tuple(d for d, n in _DIMS.items() if n == 1)}),)
