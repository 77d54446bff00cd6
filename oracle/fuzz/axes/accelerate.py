"""accelerate: a model, its optimizer and its rows prepared by an `Accelerator`, with its accumulation, clipping and checkpoints.

Switches of `DistributedDataParallelKwargs` are those of torch's constructor that the handler passes on, read off its fields; switches of
`FullyShardedDataParallelPlugin` are its fields that are true or false.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
from functools import cache
from pathlib import Path
from typing import ClassVar, Final

from proctor.oracle.fuzz.axes import OfWrapper, Rule, Wrapper, register, register_wrapper
from proctor.oracle.fuzz.axes.ddp import switches
from proctor.oracle.fuzz.axes.draft import Draft
from proctor.oracle.fuzz.axes.loop import rows_of
from proctor.oracle.fuzz.space import Choice, Point, Value

_OURS: Final[dict[str, tuple[Value, ...]]] = {"wrapper": ("accelerate",)}
_WITHOUT: Final = frozenset({"activation_checkpointing_offload", "forward_prefetch"})  # they need a device
_UNUSED: Final = "find_unused_parameters=True"
_CUTS: Final = ("fsdp2",)
_LOADERS: Final = {"loader": "", "split batches": "split_batches=True", "dispatch batches": "dispatch_batches=True, split_batches=True", "dispatch parts": "dispatch_batches=True"}


def begin(draft: Draft) -> list[str]:
    """Lines before an `Accelerator` is made: which rank it is on, and that none was made before, since there is one state of each kind in a process."""
    for line in ("import os", "from accelerate.state import AcceleratorState, GradientState"):
        draft.add_import(line)
    return [
        "os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))",
        "AcceleratorState._reset_state(True), GradientState._reset_state()",
    ]


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
        draft.add_import("from accelerate import Accelerator")
        options = [f"gradient_accumulation_steps={setting['accumulate']}"]
        if setting["acc_sync"]:
            draft.add_import("from accelerate.utils import GradientAccumulationPlugin")
            options = [f"gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps={setting['accumulate']}, {setting['acc_sync']})"]
        if setting["acc_ddp"]:
            draft.add_import("from accelerate import DistributedDataParallelKwargs")
            options.append(f"kwargs_handlers=[DistributedDataParallelKwargs({setting['acc_ddp']})]")
        if setting["acc_plugin"] in _CUTS:
            draft.add_import("from accelerate import FullyShardedDataParallelPlugin")
            policy = setting["acc_units"] or "auto_wrap_policy='no_wrap'"
            said = [f"fsdp_version={str(setting['acc_plugin'])[-1]}", str(policy), *(str(setting[name]) for name in ("acc_fsdp", "acc_kept") if setting[name])]
            if not any("cpu_ram_efficient_loading" in one for one in said):
                said.append("cpu_ram_efficient_loading=False")
            options.append(f"fsdp_plugin=FullyShardedDataParallelPlugin({', '.join(said)})")
        if setting["acc_rows"] != "ours":
            loader = _LOADERS[str(setting["acc_rows"])]
            draft.add_import("from accelerate.utils import DataLoaderConfiguration")
            draft.add_import("from torch.utils.data import DataLoader")
            options.append(f"dataloader_config=DataLoaderConfiguration({loader})")
            draft.rows = f"list(opt.accelerator.prepare_data_loader(DataLoader(torch.arange(n), batch_size={'n' if 'split' in loader else 'n // world'})))[0]"
        else:
            draft.rows = "torch.arange(n).tensor_split(world)[rank]"
        draft.wrap += [
            *begin(draft),
            f"accelerator = Accelerator(cpu=True, {', '.join(options)})",
        ]
        draft.opt = f"accelerator.prepare(net, {draft.local_optimizer})"
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

    choice = Choice("acc_plugin", ("ddp", *_CUTS))


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


class _OfPlugin(_Option):
    """What a plugin that cuts parameters is told."""

    uncut = "there is no plugin"

    def invalid(self, value: Value, setting: Point, traits: frozenset[str]) -> str:
        """As `Axis.invalid`."""
        return super().invalid(value, setting, traits) or (self.uncut if value != self.choice.values[0] and setting["acc_plugin"] not in _CUTS else "")


@cache
def _switches() -> tuple[str, ...]:
    """Fields of the plugin that are true or false, each turned to what it is not by default; none without the library. Its source is parsed, since importing it takes seconds."""
    found = importlib.util.find_spec("accelerate")
    file = Path(found.origin).parent / "utils" / "dataclasses.py" if found is not None and found.origin else None
    if file is None or not file.is_file():
        return ()
    plugin = next((node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef) and node.name == "FullyShardedDataParallelPlugin"), None)
    fields = [node for node in (plugin.body if plugin else ()) if isinstance(node, ast.AnnAssign) and "bool" in ast.unparse(node.annotation)]
    flags = {ast.unparse(node.target): _default(node.value) for node in fields} | {"cpu_ram_efficient_loading": "False"}  # as programs say
    return tuple(f"{name}={value}" for name, default in sorted(flags.items()) if name not in _WITHOUT for value in ("True", "False") if value != default)


def _default(value: ast.expr | None) -> str:
    """Source text of a field's default: `field(default=True, …)` or the value itself."""
    if isinstance(value, ast.Call):
        return next((ast.unparse(k.value) for k in value.keywords if k.arg == "default"), "")
    return ast.unparse(value) if value is not None else ""


@register
class PluginSwitch(_OfPlugin):
    """A switch of the plugin."""

    order = 6
    choice = Choice("acc_fsdp", ("", *_switches()))


@register
class Units(_OfPlugin):
    """Which modules are cut by themselves."""

    order = 6
    choice = Choice("acc_units", ("", "auto_wrap_policy='size_based_wrap', min_num_params=1", "auto_wrap_policy='size_based_wrap', min_num_params=40"))


@register
class Kept(_OfPlugin):
    """In which form a state is saved."""

    order = 6
    choice = Choice("acc_kept", ("", "state_dict_type='SHARDED_STATE_DICT'", "state_dict_type='FULL_STATE_DICT'"))
    rules = (Rule("invalid", "nothing is saved", unless={"acc_kept": ("",), "acc_state": (True,)}),)


@register
class Sync(_Option):
    """Whether gradients are reduced behind each microbatch."""

    order = 6
    choice = Choice("acc_sync", ("", "sync_each_batch=True", "sync_each_batch=False"))
    rules = (Rule("invalid", "there is one microbatch", when={"accumulate": (1,)}, unless={"acc_sync": ("",)}),)


@register
class Gathered(_Option):
    """Results of the evaluated model, gathered from all ranks."""

    order = 80
    choice = Choice("acc_gather", ("", "gather", "gather_for_metrics"))
    rules = (Rule("invalid", "ranks with unlike numbers of rows have to fill them up first", unless={"acc_gather": ("",), "split": ("even",)}),)

    def invalid(self, value: Value, setting: Point, traits: frozenset[str]) -> str:
        """As `Axis.invalid`."""
        batch = rows_of(traits)
        uneven = bool(value) and batch % int(str(setting["world"])) != 0
        return super().invalid(value, setting, traits) or ("ranks with unlike numbers of rows have to fill them up first" if uneven else "")

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """As `Axis.apply`."""
        if value:
            draft.evaluated = f"[tuple(opt.accelerator.{value}((part, out)))]"


@register
class Rows(_Option):
    """Who deals out the rows: we, or a prepared loader over their numbers."""

    choice = Choice("acc_rows", ("ours", *_LOADERS))
    rules = (Rule("invalid", "rows are dealt out evenly by a loader", unless={"acc_rows": ("ours",), "split": ("even",)}),)

    def invalid(self, value: Value, setting: Point, traits: frozenset[str]) -> str:
        """As `Axis.invalid`."""
        batch = rows_of(traits)
        uneven = batch % int(str(setting["world"])) != 0
        return super().invalid(value, setting, traits) or ("it documents that it fills up the last batch with rows that it gives twice" if uneven else "")


@register
class Skip(_Option):
    """`skip_first_batches`: a loader gives the rows behind a batch of others, which are left out, as behind a checkpoint."""

    order = 63
    choice = Choice("acc_skip", (False, True), rare=0.4)
    rules = (Rule("invalid", "no loader deals out the rows", when={"acc_skip": (True,), "acc_rows": ("ours",)}),)

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """As `Axis.apply`."""
        draft.add_import("from accelerate import skip_first_batches")
        others = draft.rows.replace("torch.arange(n)", "torch.cat([torch.zeros(n, dtype=torch.long), torch.arange(n)])")
        draft.rows = others.replace("list(", "list(skip_first_batches(", 1).replace(")[0]", ", 1))[0]")


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
