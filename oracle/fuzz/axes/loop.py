"""The training loop: microbatches, how rows are dealt out, how gradients are cleared, a scheduler."""

from __future__ import annotations

from proctor.oracle.fuzz.axes import Axis, Rule, register
from proctor.oracle.fuzz.axes.draft import Draft
from proctor.oracle.fuzz.space import Choice, Point, Value

LOCAL = frozenset({"local statistics"})
_ALONE = {"local statistics": (2, "batch norm needs two rows at once"), "needs rows": (1, "the layer takes no batch without rows, in one process either")}
# Values of `sync` that are switches of FSDP2, off for all microbatches but the last.
_CALLS = {"all-reduce last": "set_requires_all_reduce", "reshard last": "set_reshard_after_backward", "waited for last": "set_is_last_backward"}
_WHY = "the layer's statistics are those of the rows that pass it at once"


def rows_of(traits: frozenset[str]) -> int:
    """Rows of a batch, of all ranks together; 0 where the facts do not say."""
    return next((int(t.removeprefix("rows ")) for t in traits if t.startswith("rows ")), 0)


def least_rows(setting: Point, traits: frozenset[str]) -> int:
    """Rows of the smallest microbatch of any rank; a large number where the batch is not known."""
    batch = rows_of(traits) or 1 << 30
    world = {"hsdp": 4, "tp_fsdp2": 2, "tp": 1, "none": 1}.get(str(setting["wrapper"]), int(str(setting["world"])))
    rank = {"even": batch // world, "uneven": min(1, batch // world), "one empty": 0}[str(setting["split"])]
    return rank // int(str(setting["accumulate"]))


def alone(setting: Point, traits: frozenset[str]) -> str:
    """Why statistics of a microbatch cannot be computed; "" if they can."""
    return next((why for trait, (rows, why) in _ALONE.items() if trait in traits and least_rows(setting, traits) < rows), "")


@register
class Accumulate(Axis):
    """Microbatches of a step; their losses are shares of the whole batch's mean, so their number changes nothing."""

    choice = Choice("accumulate", (1, 2))
    order = 60
    rules = (
        Rule("different", _WHY, when={"accumulate": (2,)}, traits=LOCAL),
        Rule("different", "power iteration runs once for each microbatch", when={"accumulate": (2,)}, traits=frozenset({"powers"})),
    )

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """As `Axis.apply`."""
        draft.accumulate = int(str(value))

    def invalid(self, value: Value, setting: Point, traits: frozenset[str]) -> str:
        """As `Axis.invalid`."""
        return alone(setting, traits)


@register
class Sync(Axis):
    """What is done after the last microbatch only: gradients are reduced; of FSDP2, reduced over replicas, parameters cut again, or reductions waited for."""

    choice = Choice("sync", ("every", "last", *_CALLS))
    order = 61
    rules = (
        Rule("invalid", "there is one microbatch", when={"accumulate": (1,)}, unless={"sync": ("every",)}),
        Rule("invalid", "it is a switch of FSDP2", when={"sync": tuple(_CALLS)}, unless={"wrapper": ("fsdp2", "hsdp")}),
        Rule("invalid", "there are no replicas", when={"sync": ("all-reduce last",)}, unless={"wrapper": ("hsdp",)}),
        Rule("invalid", "nothing is reduced", when={"sync": ("last",)}, unless={"wrapper": ("ddp", "zero", "fsdp2", "hsdp", "fsdp1", "replicate", "spmd")}),
    )

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """As `Axis.apply`."""
        if value in _CALLS:
            draft.before_part.append(f"net.{_CALLS[str(value)]}(last)")
        elif setting["wrapper"] in ("ddp", "zero", "fsdp1"):
            draft.contexts.append("nullcontext() if last else net.no_sync()")
            draft.add_import("from contextlib import nullcontext")
        else:
            draft.before_part.append("net.set_requires_gradient_sync(last)")


@register
class Split(Axis):
    """How the rows of a batch are dealt out to the ranks."""

    choice = Choice("split", ("even", "uneven", "one empty"))
    order = 62
    rules = (
        Rule("invalid", "each rank has all rows", when={"split": ("uneven", "one empty")}, unless={"wrapper": ("ddp", "zero", "fsdp2", "hsdp", "fsdp1", "replicate", "dmp", "accelerate", "deepspeed")}),
        Rule("invalid", "one rank has all rows", when={"split": ("uneven", "one empty"), "world": (1,)}),
        Rule("different", _WHY, unless={"world": (1,), "wrapper": ("none", "tp")}, traits=LOCAL),
    )

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """As `Axis.apply`."""
        few = 1 if value == "uneven" else 0
        draft.rows = f"(torch.arange({few}) if rank == 0 else torch.arange({few}, n).tensor_split(world - 1)[rank - 1])"


@register
class ZeroGrad(Axis):
    """Whether gradients are set to zero instead of to nothing."""

    program = True
    choice = Choice("zero_grad", ("none", "zeros"), rare=0.4)
    rules = tuple(
        Rule("different", "gradients of zeros of parameters that are not used are no part of a checkpoint: they are none after it", when={"zero_grad": ("zeros",)}, unless={axis: (neutral,)},
             traits=frozenset({"sometimes unused"}))
        for axis, neutral in (("resume", "no"), ("disk", "no"))
    )

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """As `Axis.apply`."""
        draft.zero_grad = "net.zero_grad(set_to_none=False)"


@register
class Scheduler(Axis):
    """A schedule that the optimizer's groups follow."""

    program = True
    choice = Choice("scheduler", ("no", "ExponentialLR", "OneCycleLR"), rare=0.3)

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """As `Axis.apply`."""
        more = "gamma=0.5" if value == "ExponentialLR" else "max_lr=0.2, total_steps=9, cycle_momentum=False"
        draft.scheduler = f"torch.optim.lr_scheduler.{value}(opt, {more})"


@register
class Recompute(Axis):
    """Activation checkpointing of each unit; the reentrant one needs an input that requires a gradient, as its warning says."""

    choice = Choice("recompute", ("no", "non-reentrant", "reentrant"))
    order = 30
    rules = (
        Rule("invalid", "DDP takes reentrant checkpoints only of a static graph", when={"recompute": ("reentrant",), "wrapper": ("ddp", "zero")},
             unless={"ddp": ("static_graph=True",), "ddp_also": ("static_graph=True",)}),
        Rule("invalid", "reentrant checkpoints take no keyword arguments", when={"recompute": ("reentrant",)}, traits=frozenset({"keywords"})),
        Rule("invalid", "reentrant checkpoints need an input that requires a gradient", when={"recompute": ("reentrant",)}, traits=frozenset({"embedding bag"})),
        Rule("different", "power iteration runs once more in the second forward pass", unless={"recompute": ("no",)}, traits=frozenset({"powers"})),
        Rule("different", "the running statistics see the rows twice", unless={"recompute": ("no",)}, traits=LOCAL),
    )

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """As `Axis.apply`."""
        draft.add_import("from functools import partial")
        if value == "reentrant":
            draft.forward = "net(*(t[part].requires_grad_(t.is_floating_point()) for t in x))"
        draft.add_import("from torch.utils.checkpoint import checkpoint")
        units = ", ".join(draft.code.units or ("net",))
        draft.prelude.append(f"for unit in ({units},): unit.forward = partial(checkpoint, unit.forward, use_reentrant={value == 'reentrant'})")
