"""`FullyShardedDataParallel` (FSDP1): strategies, units, original or flat parameters, its own clipping, and its own state dictionaries; switches read off the constructor."""

from __future__ import annotations

import inspect
from typing import ClassVar, Final

from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, ShardingStrategy, StateDictType

from proctor.oracle.fuzz.axes import OfWrapper, Rule, Wrapper, register, register_wrapper
from proctor.oracle.fuzz.axes.draft import Draft
from proctor.oracle.fuzz.space import Choice, Point, Value

_OURS: Final[dict[str, tuple[Value, ...]]] = {"wrapper": ("fsdp1",)}
_FLAT: Final[dict[str, tuple[Value, ...]]] = {"wrapper": ("fsdp1",), "fsdp1_orig": (False,)}
_SQUARE: Final = tuple(s.name for s in ShardingStrategy if "HYBRID" in s.name)
_STRATEGIES: Final = ("FULL_SHARD", *(s.name for s in ShardingStrategy if s.name != "FULL_SHARD"))
_LEFT_OUT: Final = ("use_orig_params", "sync_module_states")  # the first is an axis of its own, the second is for modules on an accelerator
_WHOLE: Final = ("Adafactor", "LBFGS", "Muon")  # optimizers that look at more of a parameter than one element


def switches() -> tuple[str, ...]:
    """`name=value` of switches of the constructor."""
    found = [
        f"{p.name}={not p.default}"
        for p in inspect.signature(FullyShardedDataParallel.__init__).parameters.values()
        if isinstance(p.default, bool) and p.name not in _LEFT_OUT
    ]
    return (*found, *(f"backward_prefetch=BackwardPrefetch.{b.name}" for b in BackwardPrefetch if b.name != "BACKWARD_PRE"), "backward_prefetch=None")


@register_wrapper
class Fsdp1(Wrapper):
    """Parameters of each unit in one flat tensor that is cut over the ranks."""

    name: ClassVar[str] = "fsdp1"
    named: ClassVar[bool] = False
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule("invalid", "FSDP1 documents that optimizers see each rank's part of a parameter, flattened: these look at the whole", when={**_OURS, "optimizer": _WHOLE}),
        Rule("invalid", "FSDP1 documents that parameters are flattened: their dimensions do not sort them into groups", when=_OURS, unless={"groups": ("one", "named")}),
        Rule("invalid", "a flat parameter has no names of its own", when={**_FLAT, "groups": ("named",)}),
        Rule("invalid", "FSDP1 asks for use_orig_params=True where only some parameters of a unit are trained", when=_FLAT, traits=frozenset({"frozen"})),
        Rule("invalid", "ranks that call different units wait for one another", when={**_OURS, "fsdp1_units": ("each",)}, traits=frozenset({"sometimes unused"})),
        Rule("invalid", "FSDP1 takes one of each state dict type at a time: `fsdp1_state` is its own", when=_OURS, unless={"fsdp1_state": ("no",), "resume": ("no",)}),
        Rule("invalid", "its own clipping computes in single precision and refuses gradients of double", when={**_OURS, "precision": ("float64",)}, unless={"clip": ("no", "value")}),
        Rule("approximate", "its own clipping computes norms in single precision", when=_OURS, unless={"clip": ("no", "value")}, tolerance=3e-5),
        *(
            Rule("different", "parameters that were not used are a part of a flat gradient, of zeros", when=_OURS, traits=frozenset({trait}))
            for trait in ("unused", "sometimes unused")
        ),
    )

    def apply(self, draft: Draft, setting: Point) -> None:
        """As `Wrapper.apply`."""
        draft.add_import("from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy")
        strategy = str(setting["fsdp1_strategy"])
        options = ["device_id=torch.device('cpu')"] if strategy == "FULL_SHARD" else ["device_id=torch.device('cpu')", f"sharding_strategy=ShardingStrategy.{strategy}"]
        if strategy in _SQUARE:
            draft.add_import("from torch.distributed.device_mesh import init_device_mesh")
            draft.wrap.append("mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('replicate', 'shard'))")
            options.append("device_mesh=mesh")
        if setting["fsdp1_orig"]:
            options.append("use_orig_params=True")
        if setting["fsdp1"]:
            options.append(str(setting["fsdp1"]))
            if "BackwardPrefetch." in options[-1]:
                draft.add_import("from torch.distributed.fsdp import BackwardPrefetch")
        if setting["fsdp1_policy"]:
            draft.add_import("from torch.distributed.fsdp import MixedPrecision")
            options.append(f"mixed_precision=MixedPrecision({setting['fsdp1_policy']})")
        more = "".join(f", {option}" for option in options)
        units = draft.code.units if setting["fsdp1_units"] == "each" else ()
        draft.wrap += [f"{unit} = FSDP({unit}{more})" for unit in units]
        draft.wrap.append(f"net = FSDP(net{more})")
        draft.rows, draft.scale = "torch.arange(n).tensor_split(world)[rank]", " * world"
        draft.clip_norm = "net.clip_grad_norm_({limits})"


class _Option(OfWrapper):
    of = ("fsdp1",)
    absent = "there is no FSDP1"


@register
class Strategy(_Option):
    """`sharding_strategy`."""

    choice = Choice("fsdp1_strategy", _STRATEGIES)
    rules = (Rule("invalid", "a mesh of two by two has four ranks", when={"fsdp1_strategy": _SQUARE}, unless={"world": (4,)}),)


@register
class Original(_Option):
    """`use_orig_params`: the optimizer sees parameters by name instead of one flat tensor a unit."""

    choice = Choice("fsdp1_orig", (False, True))


@register
class Units(_Option):
    """Each unit by itself, or the model as one."""

    choice = Choice("fsdp1_units", ("root", "each"))

    def invalid(self, value: Value, setting: Point, traits: frozenset[str]) -> str:
        """As `Axis.invalid`."""
        return super().invalid(value, setting, traits) or ("units are named as a whole list" if "transformers" in traits else "")


@register
class Switch(_Option):
    """A switch of the constructor."""

    choice = Choice("fsdp1", ("", *switches()), rare=0.6)


@register
class Policy(_Option):
    """`MixedPrecision`."""

    choice = Choice("fsdp1_policy", ("", "reduce_dtype=torch.float32", "param_dtype=torch.bfloat16", "buffer_dtype=torch.float32"), rare=0.3)
    rules = (
        Rule("approximate", "gradients are reduced in single precision", when={"fsdp1_policy": ("reduce_dtype=torch.float32",)}, tolerance=3e-5),
        Rule("approximate", "the model computes in bfloat16", when={"fsdp1_policy": ("param_dtype=torch.bfloat16",)}, tolerance=0.15),
        Rule("invalid", "buffers of another precision go into layers that do not take them", when={"fsdp1_policy": ("buffer_dtype=torch.float32",)}, traits=frozenset({"local statistics"})),
        Rule("invalid", "buffers of another precision go into layers that do not take them", when={"fsdp1_policy": ("buffer_dtype=torch.float32",)}, traits=frozenset({"powers"})),
        Rule("invalid", "FSDP1 does not cast buffers unless it is asked to", when={"fsdp1_policy": ("param_dtype=torch.bfloat16",)}, traits=frozenset({"powers"})),
        Rule("invalid", "FSDP1 does not cast buffers unless it is asked to", when={"fsdp1_policy": ("param_dtype=torch.bfloat16",)}, traits=frozenset({"local statistics"})),
    )


@register
class State(_Option):
    """Resume by FSDP1's own state dictionaries, in all of its types: saved after the first step, loaded into a program that begins anew."""

    choice = Choice("fsdp1_state", ("no", *(t.name for t in StateDictType)), rare=0.4)
    order = 72
    rules = (
        Rule("invalid", "the schedule would follow the optimizer from before", when={"scheduler": ("ExponentialLR", "OneCycleLR")}, unless={"fsdp1_state": ("no",)}),
        Rule("invalid", "it is resumed already", unless={"fsdp1_state": ("no",), "disk": ("no",)}),
        Rule("invalid", "FSDP1 asks for another use_orig_params where a local state dict is taken", when={"fsdp1_state": ("LOCAL_STATE_DICT",), "fsdp1_orig": (True,)}),
    )

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """As `Axis.apply`."""
        draft.add_import("from torch.distributed.fsdp import StateDictType")
        draft.add_import("import copy")
        draft.add_import("from torch.utils._pytree import tree_map")
        kind = f"FSDP.state_dict_type(net, StateDictType.{value})"
        draft.after_step += [
            "if step == 0:",
            f"    with {kind}: saved = tree_map(copy.deepcopy, (net.state_dict(), FSDP.optim_state_dict(net, opt)))",  # a ShardedTensor looks through all that was copied before
            "    net, opt = build(rank, world)",
            f"    with {kind}: net.load_state_dict(saved[0]), opt.load_state_dict(FSDP.optim_state_dict_to_load(net, opt, saved[1]))",
        ]
