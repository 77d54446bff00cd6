"""TorchRec: `DistributedModelParallel`, with every table's sharding type. The names of the types are the library's (`ShardingType`).

Kernels are in single precision; tables have an optimizer of their own that runs in the backward pass, the rest has the program's.
"""

from __future__ import annotations

from typing import ClassVar, Final

from proctor.oracle.fuzz.axes import Axis, Rule, Wrapper, register, register_wrapper
from proctor.oracle.fuzz.axes.draft import Draft
from proctor.oracle.fuzz.space import Choice, Point, Value

_OURS: Final = frozenset({"torchrec"})
# Sharding type → what makes it, for table i of a world. Grid sharding asks for several hosts.
_PLANS: Final = {
    "table_wise": "table_wise(rank=i % world)",
    "row_wise": "row_wise()",
    "column_wise": "column_wise(ranks=[i % world, (i + 1) % world])",
    "table_row_wise": "table_row_wise(host_index=0)",
    "data_parallel": "data_parallel()",
}


@register_wrapper
class ModelParallel(Wrapper):
    """Tables cut by a plan, the rest under DDP."""

    name: ClassVar[str] = "dmp"
    library: ClassVar[str] = "torchrec"
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule("invalid", "DistributedModelParallel is for TorchRec's models", when={"wrapper": ("dmp",)}, lacks=_OURS),
        Rule("invalid", "TorchRec's tables are cut by its own wrapper", unless={"wrapper": ("dmp", "none")}, traits=_OURS),
        Rule("invalid", "the kernels are in single precision", unless={"precision": ("float32",)}, traits=_OURS),
        Rule("invalid", "tables have an optimizer of their own", unless={"groups": ("one",)}, traits=_OURS),
        Rule("invalid", "tables hold no gradients that could be clipped", unless={"clip": ("no",)}, traits=_OURS),
        Rule("invalid", "tables update themselves in each backward pass", unless={"accumulate": (1,)}, traits=_OURS),
        Rule("invalid", "tables have no gradients to be set to zero", unless={"zero_grad": ("none",)}, traits=_OURS),
        Rule("invalid", "tables update themselves in each evaluation of the loss", when={"optimizer": ("LBFGS",)}, traits=_OURS),
        Rule("invalid", "a plan's tables are not resumed by these methods", unless={"resume": ("no",)}, traits=_OURS),
        Rule("invalid", "tables run in the forward pass once", unless={"recompute": ("no",)}, traits=_OURS),
    )

    def apply(self, draft: Draft, setting: Point) -> None:
        """As `Wrapper.apply`."""
        kind = str(setting["rec_sharding"])
        draft.add_import("from torchrec.distributed import DistributedModelParallel, ShardingEnv")
        draft.add_import("from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder")
        draft.add_import("from torchrec.distributed.types import ShardingPlan")
        draft.add_import(f"from torchrec.distributed.sharding_plan import construct_module_sharding_plan, {kind}")
        draft.wrap += [
            "sharder, env, whole = EmbeddingBagCollectionSharder(), ShardingEnv.from_process_group(dist.group.WORLD), make().state_dict()",
            f"cuts = {{c.name: {_PLANS[kind]} for i, c in enumerate(net.bags.embedding_bag_configs())}}",
            "plan = construct_module_sharding_plan(net.bags, cuts, sharder, world, world, 'cpu')",
            "net = DistributedModelParallel(net, env, torch.device('cpu'), ShardingPlan({'bags': plan}), [sharder])",
            "for name, t in net.state_dict().items():  # tables are made anew where they are cut",
            "    for shard in getattr(t, 'local_shards', list)():",
            "        place = zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes)",
            "        shard.tensor.detach().copy_(whole[name][tuple(slice(o, o + s) for o, s in place)])",
        ]
        if kind == "data_parallel":
            draft.wrap.append("for name, t in net.state_dict().items(): t.detach().copy_(whole[name])")
        draft.rows, draft.scale = "torch.arange(n).tensor_split(world)[rank]", " * world"
        draft.net_args = "[p for name, p in net.named_parameters() if 'bags' not in name]"


@register
class Sharding(Axis):
    """How each table is cut."""

    order = 35
    library = "torchrec"
    choice = Choice("rec_sharding", tuple(_PLANS))
    rules = (Rule("invalid", "there is no plan", when={"rec_sharding": tuple(_PLANS)[1:]}, unless={"wrapper": ("dmp",)}),)

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """Nothing: the wrapper reads it."""
