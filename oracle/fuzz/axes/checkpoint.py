"""Resume from a checkpoint on disk (`torch.distributed.checkpoint`), in the same processes or in others: under another wrapper, at another number of ranks.

After the first step the state is saved; a program that begins anew loads it. With `before` or `before_world` it is saved by a *first life*, a program of its own
that trains one step with that wrapper on so many ranks and ends (`first_life`); the scenario's own program then begins with the second step.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import ClassVar, Final

from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter

from proctor.oracle.fuzz.axes import Axis, Rule, program_of, register, why_invalid
from proctor.oracle.fuzz.axes.draft import Draft
from proctor.oracle.fuzz.space import Choice, Point, Value

_FORMS: Final = {"save": "", "async": "", "full": "full_state_dict=True", "flat": "flatten_optimizer_state_dict=True", "to torch": "", "from torch": ""}
_AT: Final = "folder + '/saved'"
_FILE: Final = "folder + '/file'"
_WHOLE: Final = "StateDictOptions(full_state_dict=True)"
# What is saved once is not written over; without flattening a dictionary of tensors is one object of one rank; the third pins memory for an accelerator.
_LEFT_OUT: Final = ("overwrite", "flatten_state_dict", "cache_staged_state_dict")
_NUMBERS: Final = {"thread_count": 2}
_BEFORE: Final = ("none", "ddp", "fsdp2", "hsdp", "tp", "tp_fsdp2", "fsdp1", "pipeline")  # wrappers that a first life may have


def switches() -> tuple[str, ...]:
    """Arguments of `save` that change one switch of the writer or of the planner, read off their constructors."""
    found = []
    for cls, given in ((FileSystemWriter, f"storage_writer=FileSystemWriter({_AT}, "), (DefaultSavePlanner, "planner=DefaultSavePlanner(")):
        for p in inspect.signature(cls.__init__).parameters.values():
            if isinstance(p.default, bool) and p.name not in _LEFT_OUT:
                found.append(f"{given}{p.name}={not p.default})")
            elif p.name in _NUMBERS:
                found.append(f"{given}{p.name}={_NUMBERS[p.name]})")
    return tuple(found)


def first_life(setting: Point) -> Point | None:
    """The setting of the program that saves; None if the scenario's own program does."""
    if "before" not in setting and "before_world" not in setting:
        return None
    world = setting.get("before_world", setting.get("world", 1))
    wrapper = setting.get("before", setting.get("wrapper", "none"))
    kept: Point = {name: setting[name] for name in ("disk", "disk_switch", "ds_state", "ds_stage") if name in setting}
    if setting.get("implementation") == "lr=tensor":  # a rate is saved as what it is
        kept["implementation"] = "lr=tensor"
    return {**program_of(setting), **kept, **({"world": world} if world != 1 else {}), **({"wrapper": wrapper} if wrapper != "none" else {})}


def _saving(value: str, switch: str, *, scheduler: bool) -> list[str]:
    more = ["state['scheduler'] = scheduler.state_dict()"] if scheduler else []
    if value == "from torch":
        return [
            f"state = dict(zip(('net', 'opt'), get_state_dict(net, opt, options={_WHOLE})))",
            *more,
            f"if rank == 0: torch.save(state, {_FILE}), torch_save_to_dcp({_FILE}, {_AT})",
            "dist.barrier()",
        ]
    lines = ["state = dict(zip(('net', 'opt'), get_state_dict(net, opt, options=options)))", *more]
    if value != "async":
        return [*lines, f"dcp.save(state, checkpoint_id={_AT}{f', {switch}' if switch else ''})"]
    return [
        *lines,
        f"future = dcp.async_save(state, checkpoint_id={_AT}{f', {switch}' if switch else ''})",
        "for p in net.parameters(): p.data.zero_()  # training goes on",
        "for t in [t for s in opt.state.values() for t in s.values() if torch.is_tensor(t)]: t.zero_()",
        "future.result()",
    ]


def _loading(value: str, *, scheduler: bool) -> list[str]:
    options = "options"
    if value == "to torch":
        options = _WHOLE
        lines = [
            f"if rank == 0: dcp_to_torch_save({_AT}, {_FILE})",
            "dist.barrier()",
            f"state = torch.load({_FILE}, weights_only=True)",
        ]
    else:
        lines = ["state = dict(zip(('net', 'opt'), get_state_dict(net, opt, options=options)))"]
        lines += ["state['scheduler'] = scheduler.state_dict()"] if scheduler else []
        lines.append(f"dcp.load(state, checkpoint_id={_AT})")
    lines.append(f"set_state_dict(net, opt, model_state_dict=state['net'], optim_state_dict=state['opt'], options={options})")
    return [*lines, *(["scheduler.load_state_dict(state['scheduler'])"] if scheduler else [])]


@register
class Disk(Axis):
    """How the state goes to the disk and comes back: at once, in a thread, whole, flat, by way of a file of `torch.save` in both directions."""

    choice = Choice("disk", ("no", *_FORMS), rare=0.15)
    costs: ClassVar[Mapping[str, float]] = {"save": 1.5, "async": 1.5, "flat": 1.5, "full": 3.0, "to torch": 2.0, "from torch": 3.0}
    order = 71
    rules = (
        Rule("invalid", "it is resumed already", unless={"disk": ("no",), "resume": ("no",)}),
        Rule("invalid", "a flat state holds tensors and numbers, LBFGS has lists", when={"disk": ("flat",), "optimizer": ("LBFGS",)}),
        Rule("invalid", "ZeRO has a state_dict of its own to be consolidated first", when={"wrapper": ("zero",)}, unless={"disk": ("no",)}),
        Rule("invalid", "an expression's gradients are what is looked at", unless={"disk": ("no",)}, traits=frozenset({"operator"})),
        Rule("invalid", "the collective is what is looked at", unless={"disk": ("no",)}, traits=frozenset({"collective"})),
        Rule("invalid", "a plan's tables are not resumed by these methods", unless={"disk": ("no",)}, traits=frozenset({"torchrec"})),
        Rule("invalid", "its optimizer is no optimizer of torch's distributed checkpoints; `acc_state` has its own", when={"wrapper": ("accelerate",)}, unless={"disk": ("no",)}),
    )

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """As `Axis.apply`."""
        form, switch, scheduler = str(value), str(setting["disk_switch"]), bool(draft.scheduler)
        draft.add_import("import torch.distributed.checkpoint as dcp")
        draft.add_import("from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict")
        if form in ("to torch", "from torch"):
            draft.add_import("from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp")
        if switch:
            draft.add_import("from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter")
        options = f"options = StateDictOptions({_FORMS[form]})"
        saving, loading = _saving(form, switch, scheduler=scheduler), _loading(form, scheduler=scheduler)
        if draft.life == 2:
            draft.first = 1
            draft.before_loop += [options, *loading]
            return
        again = ["net, opt = build(rank, world)", *([f"scheduler = {draft.scheduler}"] if scheduler else []), *loading] if not draft.life else []
        draft.after_step += ["if step == 0:", *(f"    {line}" for line in (options, *saving, *again))]


class _Option(Axis):
    def invalid(self, value: Value, setting: Point, traits: frozenset[str]) -> str:
        """As `Axis.invalid`."""
        return "nothing goes to the disk" if setting["disk"] == "no" and setting["ds_state"] != "universal" else ""

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """Nothing: `disk` reads it, or the program that saves does."""


@register
class DiskSwitch(_Option):
    """A switch of the writer or of the planner."""

    choice = Choice("disk_switch", ("", *switches()), rare=0.1)
    rules = (
        Rule("invalid", "DeepSpeed's checkpoints have no such switches", unless={"disk_switch": ("",), "ds_state": ("no",)}),
        Rule("invalid", "the file becomes a checkpoint without a planner", when={"disk": ("from torch",)}, unless={"disk_switch": ("",)}),
    )


class _Life(_Option):
    def invalid(self, value: Value, setting: Point, traits: frozenset[str]) -> str:
        """As `Axis.invalid`."""
        first = first_life({name: one for name, one in setting.items() if name not in ("before", "before_world") or one not in (0, "same")})
        assert first is not None
        same = (first.get("world", 1), first.get("wrapper", "none")) == (setting["world"], setting["wrapper"])
        given = {name: one for name, one in first.items() if one != _neutral_of(name)}
        return super().invalid(value, setting, traits) or ("it is the same program" if same else why_invalid(given, traits))


def _neutral_of(name: str) -> Value:
    from proctor.oracle.fuzz.axes import axis_of

    return axis_of(name).choice.neutral


@register
class Before(_Life):
    """The wrapper of the program that saves."""

    choice = Choice("before", ("same", *_BEFORE), rare=0.15)
    costs: ClassVar[Mapping[str, float]] = dict.fromkeys(_BEFORE, 1.0)


@register
class BeforeWorld(_Life):
    """How many ranks the program that saves has."""

    choice = Choice("before_world", (0, 1, 2, 3, 4), rare=0.15)
    costs: ClassVar[Mapping[str, float]] = {"1": 0.5, "2": 0.5, "3": 1.0, "4": 1.0}
