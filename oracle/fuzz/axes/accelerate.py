"""accelerate: a model, its optimizer and its rows prepared by an `Accelerator`, with its accumulation, clipping and checkpoints.

Switches of `DistributedDataParallelKwargs` are those of torch's constructor that the handler passes on, read off its fields.
"""

from __future__ import annotations

import dataclasses
import importlib
from functools import cache
from typing import ClassVar, Final

from proctor.oracle.fuzz.axes import OfWrapper, Rule, Wrapper, register, register_wrapper
from proctor.oracle.fuzz.axes.ddp import switches
from proctor.oracle.fuzz.axes.draft import Draft
from proctor.oracle.fuzz.space import Choice, Point, Value

_OURS: Final[dict[str, tuple[Value, ...]]] = {"wrapper": ("accelerate",)}
_UNUSED: Final = "find_unused_parameters=True"
_LOADERS: Final = {"loader": "", "split batches": "split_batches=True", "dispatch batches": "dispatch_batches=True, split_batches=True"}


@register_wrapper
class Accelerate(Wrapper):
    """`Accelerator.prepare` of model and optimizer, forward and backward pass within `accumulate`."""

    name: ClassVar[str] = "accelerate"
    library: ClassVar[str] = "accelerate"
    rules: ClassVar[tuple[Rule, ...]] = (
        *(
            Rule("invalid", "DDP asks for find_unused_parameters where parameters are not used", when=_OURS, unless={"acc_ddp": (_UNUSED,), "acc_plugin": ("fsdp2",)}, traits=frozenset({trait}))
            for trait in ("unused", "sometimes unused")
        ),
        Rule("invalid", "FSDP2 does not shard parameters of no dimension", when={**_OURS, "acc_plugin": ("fsdp2",)}, traits=frozenset({"scalar"})),
        Rule("invalid", "FSDP2 asks for set_reduce_scatter_unused_params where ranks use different parameters", when={**_OURS, "acc_plugin": ("fsdp2",)},
             traits=frozenset({"sometimes unused"})),
        Rule("invalid", "a static graph promises the same parameters in each step", when={"acc_ddp": ("static_graph=True",)}, traits=frozenset({"sometimes unused"})),
        Rule("invalid", "DDP takes reentrant checkpoints only of a static graph", when={**_OURS, "recompute": ("reentrant",)}, unless={"acc_ddp": ("static_graph=True",)}),
        Rule("invalid", "its optimizer has no closure that is called more than once", when={**_OURS, "optimizer": ("LBFGS",)}),
        Rule("invalid", "it documents that prepared schedules step once for each rank", when=_OURS, unless={"scheduler": ("no",)}),
        Rule("invalid", "its optimizer is no optimizer of torch's distributed checkpoints; `acc_state` has its own", when=_OURS, unless={"resume": ("no", "plain")}),
    )

    def apply(self, draft: Draft, setting: Point) -> None:
        """As `Wrapper.apply`."""
        for line in ("import os", "from accelerate import Accelerator", "from accelerate.state import AcceleratorState, GradientState"):
            draft.add_import(line)
        options = [f"gradient_accumulation_steps={setting['accumulate']}"]
        if setting["acc_ddp"]:
            draft.add_import("from accelerate import DistributedDataParallelKwargs")
            options.append(f"kwargs_handlers=[DistributedDataParallelKwargs({setting['acc_ddp']})]")
        if setting["acc_plugin"] == "fsdp2":
            draft.add_import("from accelerate import FullyShardedDataParallelPlugin")
            options.append("fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy='no_wrap', cpu_ram_efficient_loading=False)")
        if setting["acc_rows"] != "ours":
            loader = _LOADERS[str(setting["acc_rows"])]
            draft.add_import("from accelerate.utils import DataLoaderConfiguration")
            draft.add_import("from torch.utils.data import DataLoader")
            options.append(f"dataloader_config=DataLoaderConfiguration({loader})")
            draft.rows = f"list(opt.accelerator.prepare_data_loader(DataLoader(torch.arange(n), batch_size={'n' if loader else 'n // world'})))[0]"
        else:
            draft.rows = "torch.arange(n).tensor_split(world)[rank]"
        draft.wrap += [
            "os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))",
            "AcceleratorState._reset_state(True), GradientState._reset_state()  # one of each in a process",
            f"accelerator = Accelerator(cpu=True, {', '.join(options)})",
        ]
        made = f"{draft.optimizer}({draft.net_args}{''.join(f', {k}={v}' for k, v in draft.options.items())})"
        draft.opt = f"accelerator.prepare(net, {made})"
        draft.after_build += ["net, opt = opt", "opt.accelerator = accelerator"]
        draft.scale = f" * (world*{setting['accumulate']})"  # it divides by the number of microbatches, DDP by that of ranks
        draft.contexts.append("opt.accelerator.accumulate(net)")
        draft.backward = "opt.accelerator.backward({loss})"


class _Option(OfWrapper):
    library = "accelerate"
    of = ("accelerate",)
    absent = "there is no Accelerator"


@register
class Plugin(_Option):
    """Whether parameters are replicated or cut."""

    choice = Choice("acc_plugin", ("ddp", "fsdp2"))


@register
class DdpSwitch(_Option):
    """A switch of `DistributedDataParallelKwargs`."""

    choice = Choice("acc_ddp", ("", *switches()))
    rules = (Rule("invalid", "there is no DDP", unless={"acc_ddp": ("",), "acc_plugin": ("ddp",)}),)

    def invalid(self, value: Value, setting: Point, traits: frozenset[str]) -> str:
        """As `Axis.invalid`."""
        known = str(value).partition("=")[0] in _passed_on()
        return super().invalid(value, setting, traits) or ("" if known else "the handler does not pass it on")


@cache
def _passed_on() -> frozenset[str]:
    handler = importlib.import_module("accelerate").DistributedDataParallelKwargs
    return frozenset(f.name for f in dataclasses.fields(handler))


@register
class Rows(_Option):
    """Who deals out the rows: we, or a prepared loader over their numbers."""

    choice = Choice("acc_rows", ("ours", *_LOADERS))
    rules = (Rule("invalid", "rows are dealt out evenly by a loader", unless={"acc_rows": ("ours",), "split": ("even",)}),)

    def invalid(self, value: Value, setting: Point, traits: frozenset[str]) -> str:
        """As `Axis.invalid`."""
        batch = next((int(t.removeprefix("rows ")) for t in traits if t.startswith("rows ")), 0)
        uneven = batch % int(str(setting["world"])) != 0
        return super().invalid(value, setting, traits) or ("it documents that it fills up the last batch with rows that it gives twice" if uneven else "")


@register
class Clip(_Option):
    """Clipping by the `Accelerator`'s own methods."""

    order = 80
    choice = Choice("acc_clip", (False, True))
    rules = (
        Rule("invalid", "nothing is clipped", when={"acc_clip": (True,), "clip": ("no",)}),
        Rule("invalid", "its methods have no such argument", when={"acc_clip": (True,)}, unless={"clip_foreach": ("",)}),
    )

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """As `Axis.apply`."""
        draft.after_backward = [line.replace("nn.utils.clip_grad_", "opt.accelerator.clip_grad_") for line in draft.after_backward]


@register
class State(_Option):
    """`save_state` after the first step, `load_state` into a program that begins anew."""

    order = 70
    choice = Choice("acc_state", (False, True), rare=0.4)
    rules = (Rule("invalid", "it is resumed already", when={"acc_state": (True,)}, unless={"resume": ("no",)}),)

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """As `Axis.apply`."""
        draft.add_import("import tempfile")
        draft.after_step += [
            "if step == 0:",
            "    folder = [tempfile.mkdtemp() if rank == 0 else None]",
            "    dist.broadcast_object_list(folder)",
            "    opt.accelerator.save_state(folder[0])",
            "    net, opt = build(rank, world)",
            "    opt.accelerator.load_state(folder[0])",
        ]
