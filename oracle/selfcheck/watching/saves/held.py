"""What an object that a program saves holds of what it trains with: looked for by value, wherever it lies in the object.

    what is saved ──▶ `Seen` (tensors, dictionaries of numbers, numbers, optimizers' states) ──▶ `held` (which parts are in it)

Nothing goes by names: a state of an optimizer is there if its tensors are, a schedule if a dictionary has its numbers.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import torch

PROBED: Final = 1024  # elements of a tensor that are compared
MAX_DEPTH: Final = 20

Print = tuple[tuple[int, ...], str, bytes]  # shape, type, digest of some elements


class Part(msgspec.Struct, frozen=True):
    """What a save has of one thing that the program trains with.

    Attributes:
        kind: `optimizer`, `parameters`, `schedule` or `scaler`.
        name: its class.
        number: of the optimizer to which it belongs.
        found: of `of` tensors; a schedule is one.
        of: that it has; 0 where it has nothing that could be lost.
        perhaps: what is not found may be there in another form (values of another moment, a number from which it is made).
        lost: one of what is not found.
    """

    kind: str
    name: str
    number: int
    found: int
    of: int
    perhaps: bool = False
    lost: str = ""


class Seen:
    """Everything in an object.

    Attributes:
        prints: of its tensors.
        numbers: outside of optimizers' states and schedules.
        plain: dictionaries with numbers in them.
        whole: it could be looked through.
    """

    def __init__(self, value: Any) -> None:
        self.prints: set[Print] = set()
        self.shapes: Counter[tuple[int, ...]] = Counter()
        self.types: set[torch.dtype] = set()
        self.numbers: set[int] = set()
        self.plain: list[Mapping[Any, Any]] = []
        self.whole = True
        self._known: set[int] = set()
        self._keep: list[Any] = []  # what is looked at stays alive, so that no number of it is given twice
        self._walk(value, 0, True)

    def _walk(self, value: Any, depth: int, counts: bool) -> None:
        if isinstance(value, bool) or value is None or isinstance(value, str | bytes):
            return
        if isinstance(value, int):
            if counts:
                self.numbers.add(value)
            return
        if isinstance(value, float) or id(value) in self._known:
            return
        self._known.add(id(value))
        self._keep.append(value)
        if isinstance(value, torch.Tensor):
            self._tensor(value)
        elif depth >= MAX_DEPTH:
            self.whole = False
        elif isinstance(value, torch.nn.Module | torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler):
            self._walk(value.state_dict(), depth + 1, counts and isinstance(value, torch.nn.Module))
        elif isinstance(value, Mapping):
            if any(_number(v) for v in value.values()):
                self.plain.append(value)
            inside = counts and not ({"state", "param_groups"} <= value.keys())  # torch's form of an optimizer's state: numbers of parameters are not the program's
            for item in value.values():
                self._walk(item, depth + 1, inside)
        elif isinstance(value, list | tuple | set | frozenset):
            for item in value:
                self._walk(item, depth + 1, counts)
        else:
            self._pickled(value, depth, counts)

    def _pickled(self, value: Any, depth: int, counts: bool) -> None:
        """What any other object would write."""
        seen = self

        class Looking(pickle.Pickler):
            def persistent_id(self, item: Any) -> Any:
                if item is value:
                    return None
                if isinstance(item, torch.Tensor | Mapping | list | tuple | set | int | float | torch.nn.Module | torch.optim.Optimizer):
                    seen._walk(item, depth + 1, counts)
                    return "seen"
                return None

        try:
            Looking(io.BytesIO()).dump(value)
        except Exception:  # noqa: BLE001 - an object of the program's that only its own pickler knows
            self.whole = False

    def _tensor(self, value: torch.Tensor) -> None:
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or not value.numel() or value.layout != torch.strided:
            self.whole = self.whole and type(value) in (torch.Tensor, torch.nn.Parameter)
            return
        self.types.add(value.dtype)
        self.shapes[tuple(value.shape)] += 1
        self.prints.add(_print(value, value.dtype))

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's values are there, in its type or in one to which it was cast."""
        return any(_print(tensor, kind) in self.prints for kind in {tensor.dtype, *(t for t in self.types if t.is_floating_point and tensor.is_floating_point())})


def held(value: Any, optimizers: Sequence[Any], schedules: Sequence[Any], scalers: Sequence[Any], moved: Mapping[int, bool]) -> tuple[list[Part], bool]:
    """Which parts of what a program trains with are in an object.

    Args:
        value: that is saved.
        optimizers: that step now.
        schedules: of theirs.
        scalers: of losses.
        moved: by id of a parameter, whether it ever had a gradient.

    Returns:
        parts, and whether all of the object could be seen.
    """
    seen, out = Seen(value), []
    for number, optimizer in enumerate(optimizers):
        states = [(f"{key} of a parameter of shape {tuple(p.shape)}", t) for p, state in optimizer.state.items() for key, t in state.items() if _counts(t)]
        found = [seen.has(t) for _, t in states]
        lost = next((n for (n, _), there in zip(states, found, strict=True) if not there), "")
        params = [p for g in optimizer.param_groups for p in g["params"] if moved.get(id(p), p.requires_grad) and _counts(p)]
        there = [seen.has(p) for p in params]
        out.append(Part("parameters", type(optimizer).__name__, number, sum(there), len(there), lost=next((f"one of shape {tuple(p.shape)}" for p, t in zip(params, there, strict=True) if not t), "")))
        needed = Counter(tuple(t.shape) for (_, t), t_found in zip(states, found, strict=True) if not t_found)
        spare = seen.shapes - Counter(tuple(p.shape) for p, t in zip(params, there, strict=True) if t)
        elsewhere = bool(needed) and all(spare[shape] >= n for shape, n in needed.items())
        sharded = any(type(t) not in (torch.Tensor, torch.nn.Parameter) for _, t in states) or hasattr(optimizer, "consolidate_state_dict")
        out.append(Part("optimizer", type(optimizer).__name__, number, sum(found), len(found), elsewhere or sharded, lost))
    owners = {id(o): n for n, o in enumerate(optimizers)}
    for kind, items in (("schedule", schedules), ("scaler", scalers)):
        for item in items:
            numbers = {k: v for k, v in item.state_dict().items() if _number(v)}
            there_is = bool(numbers) and any(all(_number(d.get(k)) and d[k] == v for k, v in numbers.items()) for d in seen.plain)
            rebuilt = any(n > 0 for n in seen.numbers)
            out.append(Part(kind, type(item).__name__, owners.get(id(getattr(item, "optimizer", None)), 0), int(there_is), int(bool(numbers)), kind == "schedule" and rebuilt))
    return out, seen.whole


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _counts(value: Any) -> bool:
    """Whether losing it would be noticed: tensors of some numbers that are not all zero."""
    return isinstance(value, torch.Tensor) and value.numel() > 1 and value.layout == torch.strided and bool(value.detach().any())


def _print(tensor: torch.Tensor, kind: torch.dtype) -> Print:
    flat = tensor.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // PROBED)].to(kind).cpu().contiguous()
    return tuple(tensor.shape), str(kind), hashlib.blake2b(bytes(some.view(torch.uint8).tolist()) if some.numel() else b"", digest_size=16).digest()
