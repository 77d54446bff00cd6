"""Parameters, buffers, gradients and optimizer state of one moment by value, and putting them back.

Gradients are of another moment than the rest, the step's first backward: whether they are cleared in the step's first act
or were before it is then the same.

What is called the same in two processes of one program is matched by role and name; several tensors of one name are told
apart by the order in which they were found.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from proctor.instrument.capsules.held import Copies, Held, clone, is_plain, leaves
from proctor.instrument.observe.content import readable, unseen
from proctor.instrument.observe.plainly import is_tensor
from proctor.invariants.capsule import Group, Plain, Variable

if TYPE_CHECKING:
    from torch import Tensor

    from proctor.instrument.observe.state import StateTracker

Slot = tuple[str, str]  # role and name
SCALER: Final = ("_scale", "_growth_tracker")
_PLACE: Final = re.compile(r"\['([^']+)'\](?:\[(\d+)\])?")


class Value(NamedTuple):
    """One thing of the state: a tensor, or a plain value of an optimizer's state."""

    role: str
    name: str
    plain: Plain = None
    optimizer: str = ""
    trains: bool = True


Found = tuple[Value, "Tensor | None"]  # the tensor is the user's


class StateValues:
    """State by value.

    Args:
        found: what there was; its tensors are copied.
        groups: hyperparameters.
        missing: what could not be read.
        earlier: state whose memory may be used again.
    """

    def __init__(
        self, found: list[Found], groups: list[Group], missing: list[str], earlier: StateValues | None = None
    ) -> None:
        self.groups, self.missing = groups, missing
        self._things = [(value, tensor is not None) for value, tensor in found]
        tensors = [tensor for _, tensor in found if tensor is not None]
        self._copies: Copies = clone(tensors, earlier._copies if earlier is not None else None)

    @cached_property
    def held(self) -> list[tuple[Value, Held | None]]:
        """Each thing and its content; made when it is asked for, which for most steps never happens."""
        copies = iter(self._copies)
        return [(value, _held(next(copies)) if by_value else None) for value, by_value in self._things]


def _held(copy: Tensor) -> Held:
    return Held(copy, copy, None)


def names(tracker: StateTracker) -> dict[Any, str]:
    """A distinct name for each parameter (by id) and buffer (by id of the module and name in it)."""
    found: dict[Any, str] = {}
    times: dict[str, int] = {}

    def put(key: Any, name: str) -> None:
        count = times[name] = times.get(name, 0) + 1
        found[key] = name if count == 1 else f"{name}#{count - 1}"

    for key, _ in tracker.parameters():
        put(key, tracker.names.get(key, "parameter"))
    for buffer, _ in tracker.buffers():
        put(buffer, ".".join(filter(None, [tracker.names.get(buffer[0], ""), buffer[1]])))
    return found


def collect(
    tracker: StateTracker, scalers: Iterable[Any], known: dict[Any, str] | None = None
) -> tuple[list[Found], list[Group], list[str]]:
    """Everything of the state now: values, hyperparameters, and what cannot be read.

    Args:
        known: what `names` gives now.
    """
    known = names(tracker) if known is None else known
    found: list[Found] = []
    missing: list[str] = []

    def put(role: str, name: str, tensor: Any, optimizer: str = "", trains: bool = True) -> None:
        plain = readable(tensor)
        if plain is None:
            missing.append(f"{role} {name}: its memory cannot be read")
        else:
            found.append((Value(role, name, None, optimizer, trains), plain))

    for parameter, p in tracker.parameters():
        put("parameter", known[parameter], p, trains=p.requires_grad)
    for buffer, b in tracker.buffers():
        put("buffer", known[buffer], b)
    groups: list[Group] = []
    for label, optimizer in tracker.optimizers():
        for p, state in getattr(optimizer, "state", {}).items():
            name = known.get(id(p))
            if name is None or not isinstance(state, dict):
                missing.append(f"state of optimizer {label}: of something that is not a tracked parameter")
                continue
            for place, leaf in leaves(state):
                path = f"{name}{place}"
                if is_tensor(leaf):
                    put("optimizer", path, leaf, label)
                elif is_plain(leaf) and not place.endswith(">"):
                    found.append((Value("optimizer", path, leaf, label), None))
                else:
                    missing.append(f"optimizer {label}, {path}: {type(leaf).__name__}")
        for i, group in enumerate(optimizer.param_groups):
            plain_values, tensors = _hyper(group)
            groups.append(Group(label, type(optimizer).__name__, i, plain_values))
            for option, tensor in tensors.items():
                put("hyper", f"{label}/{i}/{option}", tensor, label)
    for i, scaler in enumerate(scalers):
        for part in SCALER:
            if getattr(scaler, part, None) is not None:
                put("scaler", f"{i}/{part}", getattr(scaler, part))
    return found, groups, missing


def gradients(tracker: StateTracker, known: dict[Any, str], read: Callable[[Iterable[Tensor]], list[Tensor | None] | None]) -> tuple[list[Found], list[str]]:
    """What accumulates before a backward: values, and what cannot be read.

    Args:
        known: what `names` gives now.
        read: `Turns.gradients`.
    """
    tracked = tracker.parameters()
    grads = read(p for _, p in tracked)
    if grads is None:
        return [], ["gradients before the first backward: another thread wrote them"]
    there = [(known[key], grad) for (key, _), grad in zip(tracked, grads) if grad is not None]
    plain = [(name, readable(grad)) for name, grad in there]
    missing = [f"gradient {name}: its memory cannot be read" for name, grad in plain if grad is None]
    return [(Value("gradient", name), grad) for name, grad in plain if grad is not None], missing


def _hyper(group: dict[str, Any]) -> tuple[dict[str, Plain | list[Plain]], dict[str, Any]]:
    plain: dict[str, Plain | list[Plain]] = {}
    tensors: dict[str, Any] = {}
    for key, value in group.items():
        if key == "params":
            continue
        if is_plain(value):
            plain[str(key)] = value
        elif isinstance(value, list | tuple) and len(value) <= 64 and all(is_plain(v) for v in value):
            plain[str(key)] = list(value)
        elif is_tensor(value):
            tensors[str(key)] = value
    return plain, tensors


def restore(
    tracker: StateTracker,
    scalers: Iterable[Any],
    state: Iterable[Variable],
    groups: Iterable[Group],
    load: Callable[[str], Tensor],
) -> list[str]:
    """Put recorded state into the live objects; returns what could not be put back.

    Args:
        state, groups: of a capsule.
        load: gives a tensor of its file.
    """
    wanted = {(v.role, v.name): v for v in state}
    trouble: list[str] = []
    with unseen():
        _restore_models(tracker, wanted, load, trouble)
        _restore_optimizers(tracker, list(wanted.values()), groups, load, trouble)
        for i, scaler in enumerate(scalers):
            for key in SCALER:
                held = wanted.get(("scaler", f"{i}/{key}"))
                if held is not None:
                    _restore_scaler(scaler, key, load(held.key))
    return trouble


def _restore_models(tracker: StateTracker, wanted: dict[Slot, Variable], load: Callable[[str], Tensor], trouble: list[str]) -> None:
    known = names(tracker)
    live: dict[Slot, Any] = {("parameter", known[key]): p for key, p in tracker.parameters()}
    live |= {("buffer", known[key]): b for key, b in tracker.buffers()}
    for slot, held in wanted.items():
        if slot[0] not in ("parameter", "buffer") or not held.key:
            continue
        there = live.pop(slot, None)
        if there is None:
            trouble.append(f"{slot[0]} {slot[1]} is not in this program")
            continue
        _fill(there, load(held.key), f"{slot[0]} {slot[1]}", trouble)
        if slot[0] == "parameter" and there.requires_grad != held.trains:
            there.requires_grad_(held.trains)
    trouble += [f"{role} {name} is not in the capsule" for role, name in live]


def restore_gradients(tracker: StateTracker, state: Iterable[Variable], load: Callable[[str], Tensor]) -> None:
    """Put back what a backward adds to."""
    wanted = {v.name: v for v in state if v.role == "gradient" and v.key}
    known = names(tracker)
    with unseen():
        for key, p in tracker.parameters():
            held = wanted.get(known[key])
            if held is None:
                p.grad = None
            elif p.grad is None:
                p.grad = _like(p, load(held.key))
            else:  # it may be a view of a bucket
                getattr(p.grad, "_local_tensor", p.grad).copy_(load(held.key))


def _restore_optimizers(
    tracker: StateTracker,
    state: list[Variable],
    groups: Iterable[Group],
    load: Callable[[str], Tensor],
    trouble: list[str],
) -> None:
    optimizers = dict(tracker.optimizers())
    for group in groups:
        optimizer = optimizers.get(group.optimizer)
        if optimizer is None or group.index >= len(optimizer.param_groups):
            trouble.append(f"optimizer {group.optimizer} ({group.kind}), group {group.index} is not in this program")
            continue
        live = optimizer.param_groups[group.index]
        for key, value in group.values.items():
            live[key] = tuple(value) if isinstance(value, list) and isinstance(live.get(key), tuple) else value
    known = names(tracker)
    for label, optimizer in optimizers.items():
        mine = [v for v in state if v.role == "optimizer" and v.optimizer == label]
        for p in [p for g in optimizer.param_groups for p in g["params"]]:
            name = known.get(id(p), "")
            entries = {v.name[len(name) :]: v for v in mine if v.name.startswith(f"{name}[")}
            if entries:
                optimizer.state[p] = _rebuild(p, entries, load, trouble)
            elif p in optimizer.state:
                del optimizer.state[p]
        for v in state:
            if v.role == "hyper" and v.optimizer == label:
                _, index, key = v.name.split("/", 2)
                _fill(optimizer.param_groups[int(index)][key], load(v.key), v.name, trouble)


def _rebuild(p: Any, entries: dict[str, Variable], load: Callable[[str], Tensor], trouble: list[str]) -> dict[str, Any]:
    """The state dict of a parameter from places such as `['exp_avg']` and `['old_dirs'][3]`."""
    out: dict[str, Any] = {}
    for place, held in entries.items():
        value: Any = held.value
        if held.key:
            value = load(held.key)
            if value.dim() and value.shape == getattr(p, "_local_tensor", p).shape:
                value = _like(p, value)
            elif held.device != "cpu":
                value = value.to(getattr(p, "_local_tensor", p).device)
        parsed = _PLACE.fullmatch(place)
        if parsed is None:
            trouble.append(f"optimizer state {held.name} cannot be put back")
        elif parsed[2] is None:
            out[parsed[1]] = value
        else:  # a list, as that of L-BFGS; its items come in order
            out.setdefault(parsed[1], []).append(value)
    return out


def _like(p: Any, value: Tensor) -> Any:
    """A tensor on the parameter's device, and sharded as it is."""
    moved = value.to(getattr(p, "_local_tensor", p).device)
    if hasattr(p, "_local_tensor"):
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(moved, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())
    return moved


def _fill(there: Any, value: Tensor, name: str, trouble: list[str]) -> None:
    local = getattr(there, "_local_tensor", there)
    if tuple(local.shape) != tuple(value.shape) or local.dtype != value.dtype:
        trouble.append(f"{name} is {local.dtype} {tuple(local.shape)} here and {value.dtype} {tuple(value.shape)} in the capsule")
        return
    local.detach().copy_(value)


def _restore_scaler(scaler: Any, key: str, value: Tensor) -> None:
    """A scaler makes its tensors at its first `scale`."""
    there = getattr(scaler, key, None)
    if there is not None:
        there.copy_(value)
    else:
        setattr(scaler, {"_scale": "_init_scale", "_growth_tracker": "_init_growth_tracker"}[key], value.item())
