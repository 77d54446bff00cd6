"""`DistributedDataParallel`: its switches, read off its constructor, and its communication hooks, read off their enumeration."""

from __future__ import annotations

import inspect
from typing import ClassVar

import torch
from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType
from torch.nn.parallel import DistributedDataParallel

from proctor.oracle.fuzz.axes import Axis, Rule, Wrapper, register, register_wrapper
from proctor.oracle.fuzz.axes.draft import Draft
from proctor.oracle.fuzz.space import Choice, Point, Value

WRAPPERS = ("ddp", "zero")
NCCL = ("BF16_COMPRESS",)  # its own check refuses every other backend
LOSSY = tuple(h.name for h in DDPCommHookType if h.name not in ("ALLREDUCE", "NOOP"))
_LEFT_OUT = ("check_reduction", "init_sync")  # the first does nothing any more; without the second ranks must agree before
_TEXTS = {"bucket_cap_mb": "0.00001", "broadcast_buffers": "False", "forward_sync_buffers": "True"}


def switches() -> tuple[str, ...]:
    """`name=value` of every switch of the constructor."""
    found = []
    for p in inspect.signature(DistributedDataParallel.__init__).parameters.values():
        if isinstance(p.default, bool) and p.name not in _LEFT_OUT:
            found.append(f"{p.name}={not p.default}")
        elif p.name in _TEXTS:
            found.append(f"{p.name}={_TEXTS[p.name]}")
    return tuple(sorted(found))


def wrap(draft: Draft, setting: Point) -> None:
    """Wrap `net`, deal out rows, and undo the mean over ranks."""
    draft.add_import("from torch.nn.parallel import DistributedDataParallel as DDP")
    options = "".join(f", {setting[name]}" for name in ("ddp", "ddp_also") if setting[name])
    draft.wrap.append(f"net = DDP(net{options})")
    draft.rows, draft.scale = "torch.arange(n).tensor_split(world)[rank]", " * world"


@register_wrapper
class Ddp(Wrapper):
    """The model on each rank, gradients averaged."""

    name: ClassVar[str] = "ddp"
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule("invalid", "DDP asks for find_unused_parameters where parameters are not used", when={"wrapper": WRAPPERS}, traits=frozenset({"unused"}),
             unless={"ddp": ("find_unused_parameters=True",), "ddp_also": ("find_unused_parameters=True",)}),
        Rule("invalid", "DDP asks for find_unused_parameters where parameters are not used", when={"wrapper": WRAPPERS}, traits=frozenset({"sometimes unused"}),
             unless={"ddp": ("find_unused_parameters=True",), "ddp_also": ("find_unused_parameters=True",)}),
        Rule("invalid", "a static graph promises the same parameters in each step", when={"wrapper": WRAPPERS, "ddp": ("static_graph=True",)},
             traits=frozenset({"sometimes unused"})),
        Rule("invalid", "a static graph promises the same parameters in each step", when={"wrapper": WRAPPERS, "ddp_also": ("static_graph=True",)},
             traits=frozenset({"sometimes unused"})),
    )

    def apply(self, draft: Draft, setting: Point) -> None:
        """As `Wrapper.apply`."""
        wrap(draft, setting)


class _Switch(Axis):
    order = 35

    def invalid(self, value: Value, setting: Point, traits: frozenset[str]) -> str:
        """As `Axis.invalid`."""
        return "" if setting["wrapper"] in WRAPPERS else "there is no DDP"

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """Nothing: the wrapper reads it."""


@register
class DdpSwitch(_Switch):
    """A switch of the constructor."""

    choice = Choice("ddp", ("", *switches()))


@register
class DdpAlso(_Switch):
    """A second switch, so that two that do not go together meet."""

    choice = Choice("ddp_also", ("", *switches()))

    def invalid(self, value: Value, setting: Point, traits: frozenset[str]) -> str:
        """As `Axis.invalid`."""
        first = str(setting["ddp"]).partition("=")[0]
        return super().invalid(value, setting, traits) or ("the same switch twice" if first >= str(value).partition("=")[0] else "")


@register
class DdpHook(_Switch):
    """A communication hook."""

    order = 45
    choice = Choice("ddp_hook", ("", *(h.name for h in DDPCommHookType if h.name not in NCCL or torch.cuda.is_available())))
    rules = (
        Rule("invalid", "ranks whose gradients differ search lines of their own, and wait for one another", when={"ddp_hook": ("NOOP",), "optimizer": ("LBFGS",)}),
        Rule("different", "the hook does not reduce gradients", when={"ddp_hook": ("NOOP",)}, unless={"world": (1,)}),
        Rule("different", "the hook reduces what it compressed", when={"ddp_hook": LOSSY}),
    )

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """As `Axis.apply`."""
        draft.add_import("from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType, register_ddp_comm_hook")
        draft.wrap.append(f"register_ddp_comm_hook(DDPCommHookType.{value}, net, dist.group.WORLD)")
