"""TorchRec: `DistributedModelParallel` with two sharders, every table's sharding type, quantised inference, and how pooled values are read.

The names of the types are the library's (`ShardingType`). Kernels are in single precision; tables have an optimizer of their own that runs in the
backward pass, the rest has the program's.
"""

from __future__ import annotations

import importlib
from functools import cache
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
    "mixed": "(table_wise(rank=i % world), column_wise(ranks=[i % world, (i + 1) % world]), row_wise())[i % 3]",
}
_MAKERS: Final = {"mixed": "column_wise, row_wise, table_wise"}  # what a plan is written with, where that is not its name

_READS: Final = {
    "to_dict": "torch.cat([value for _, value in sorted(bags.to_dict().items())], 1)",
    "key by key": "torch.cat([bags[key] for key in sorted(bags.keys())], 1)",
    "regroup": "KeyedTensor.regroup([bags], [sorted(bags.keys())])[0]",
}
_WEIGHTS: Final = ("qint8", "float16")
_GIVEN: Final = ("float32", "qint8", "float16")
_QUANTISED: Final = tuple(f"{weights} {given}" for weights in _WEIGHTS for given in _GIVEN if weights == "qint8" or given != "qint8")  # the kernel has int8 results of int8 weights alone, and says so


@register_wrapper
class ModelParallel(Wrapper):
    """Tables cut by a plan, the rest under DDP."""

    name: ClassVar[str] = "dmp"
    named: ClassVar[bool] = False
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
        sequences = "sequences" in draft.code.traits
        collections = "EmbeddingCollectionSharder" if sequences else "EmbeddingBagCollectionSharder"
        kind, sharder = str(setting["rec_sharding"]), "EmbeddingBagSharder" if setting["rec_sharder"] == "bag" else collections
        draft.add_import("from torchrec.distributed import DistributedModelParallel, ShardingEnv")
        draft.add_import(f"from torchrec.distributed.{'embedding' if sequences else 'embeddingbag'} import {sharder}")
        draft.add_import("from torchrec.distributed.types import ShardingPlan")
        draft.add_import(f"from torchrec.distributed.sharding_plan import construct_module_sharding_plan, {_MAKERS.get(kind, kind)}")
        draft.wrap.append(f"sharder, env, whole = {sharder}(), ShardingEnv.from_process_group(dist.group.WORLD), make().state_dict()")
        if setting["rec_sharder"] == "bag":
            draft.wrap += [
                "bags = [(f'bags.embedding_bags.{name}', bag) for name, bag in net.bags.embedding_bags.items()]",
                f"cuts = [{{'weight': {_PLANS[kind]}}} for i, _ in enumerate(bags)]",
                "plan = {path: construct_module_sharding_plan(bag, cut, sharder, world, world, 'cpu') for (path, bag), cut in zip(bags, cuts)}",
            ]
        else:
            draft.wrap += [
                f"cuts = {{c.name: {_PLANS[kind]} for i, c in enumerate(net.bags.{'embedding_configs' if sequences else 'embedding_bag_configs'}())}}",
                "plan = {'bags': construct_module_sharding_plan(net.bags, cuts, sharder, world, world, 'cpu')}",
            ]
        draft.wrap += [
            "net = DistributedModelParallel(net, env, torch.device('cpu'), ShardingPlan(plan), [sharder])",
            "for name, t in net.state_dict().items():",
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
    """How each table is cut; mixed: neighbouring tables in three ways."""

    order = 35
    library = "torchrec"
    choice = Choice("rec_sharding", tuple(_PLANS))
    sorts = True
    rules = (
        Rule("invalid", "there is no plan", when={"rec_sharding": tuple(_PLANS)[1:]}, unless={"wrapper": ("dmp",)}),
        Rule("different", "each part of a table that is cut by columns has a state of rows of its own", when={"rec_sharding": ("column_wise", "mixed")}, traits=frozenset({"state of rows"})),
    )

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """Nothing: the wrapper reads it."""


@register
class Sharder(Axis):
    """Who cuts: the sharder of collections, or the one of single bags, with the types that it lists itself."""

    order = 34
    library = "torchrec"
    choice = Choice("rec_sharder", ("collection", "bag"), rare=0.5)
    rules = (
        Rule("invalid", "there is no plan", when={"rec_sharder": ("bag",)}, unless={"wrapper": ("dmp",)}),
        Rule("invalid", "the model has no bags", when={"rec_sharder": ("bag",)}, traits=frozenset({"sequences"})),
        Rule("invalid", "the sharder of single bags documents that it pools by sums", when={"rec_sharder": ("bag",)}, traits=frozenset({"mean bags"})),
    )

    def invalid(self, value: Value, setting: Point, traits: frozenset[str]) -> str:
        """As `Axis.invalid`."""
        return "" if setting["rec_sharding"] in _listed() else "the sharder of single bags does not list this type"

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """Nothing: the wrapper reads it."""


@cache
def _listed() -> frozenset[str]:
    """Sharding types that `EmbeddingBagSharder` says it has on a processor."""
    sharders = importlib.import_module("torchrec.distributed.embeddingbag")
    return frozenset(sharders.EmbeddingBagSharder().sharding_types("cpu"))


@register
class Read(Axis):
    """How the pooled values of a `KeyedTensor` are read: all at once, or key by key."""

    order = 36
    library = "torchrec"
    choice = Choice("rec_read", ("values", *_READS))
    rules = (
        Rule("invalid", "the model has no collection", when={"rec_read": tuple(_READS)}, lacks=_OURS),
        Rule("invalid", "embeddings of sequences are not pooled", when={"rec_read": tuple(_READS)}, traits=frozenset({"sequences"})),
    )

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """As `Axis.apply`."""
        draft.prelude.append(f"net.read = lambda bags: {_READS[str(value)]}")


@register
class Quantised(Axis):
    """The evaluated model's tables as `quantize_embeddings` makes them: types of weights and of what they give."""

    program = True
    order = 65
    library = "torchrec"
    choice = Choice("rec_quant", ("no", *_QUANTISED), rare=0.4)
    rules = (
        Rule("invalid", "the model has no collection", unless={"rec_quant": ("no",)}, lacks=_OURS),
        Rule("invalid", "only tables of bags are quantised here", unless={"rec_quant": ("no",)}, traits=frozenset({"sequences"})),
        Rule("invalid", "quantised tables are not cut here", unless={"rec_quant": ("no",), "wrapper": ("none",)}),
    )

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """As `Axis.apply`."""
        weights, given = str(value).split()
        draft.add_import("from torchrec.inference.modules import quantize_embeddings")
        draft.before_evaluation.append(f"net = quantize_embeddings(net, torch.{weights}, inplace=True, output_dtype=torch.{given})")
        draft.evaluation = "net(*(t[part] for t in x), over=False).double()"
