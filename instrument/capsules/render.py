"""From a kept step to a capsule: fingerprints of the copies, and the tensors that go into its file. Not for the training thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from proctor.instrument.capsules.held import Held, is_plain
from proctor.instrument.capsules.rng import RngState
from proctor.instrument.observe.content import unseen
from proctor.instrument.observe.fingerprint import fingerprint_all
from proctor.invariants.capsule import Batch, Blob, Call, Capsule, Generator, Print, Seen, Variable
from proctor.invariants.schema import StateFlag

if TYPE_CHECKING:
    from torch import Tensor

    from proctor.instrument.capsules.step import HeldStep
    from proctor.instrument.observe.seen import Seen as LastSeen

DTYPES: Final = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


class _Tensors:
    """Names for the tensors of a file; the same tensor goes in once."""

    def __init__(self) -> None:
        self.blobs: list[Blob] = []
        self._keys: dict[int, str] = {}
        self._prints: dict[int, Print] = {}
        self._taken: set[str] = set()

    def put(self, name: str, held: Held) -> tuple[str, Print | None, str]:
        """Key, content and note of a tensor."""
        if held.copy is None:
            return "", None if held.summary is None else _print(held.summary), held.note
        if id(held) in self._keys:
            return self._keys[id(held)], self._prints[id(held)], ""
        here = _on_cpu(held.copy)
        content = _print(fingerprint_all([here])[0])
        dtype = DTYPES.get(held.dtype)
        if dtype is None:
            return "", content, f"{held.dtype} has no place in a safetensors file"
        key = self.add(name, dtype, tuple(held.shape), here.numel() * here.element_size(), partial(_bytes, here))
        self._keys[id(held)], self._prints[id(held)] = key, content
        return key, content, ""

    def add(self, name: str, dtype: str, shape: tuple[int, ...], nbytes: int, content: Callable[[], memoryview]) -> str:
        key, n = name, 1
        while key in self._taken:
            n += 1
            key = f"{name}~{n}"
        self._taken.add(key)
        self.blobs.append(Blob(key, dtype, shape, nbytes, content))
        return key


def render(step: HeldStep, first_batch: int) -> tuple[Capsule, list[Blob]]:
    """The capsule of a step, without what is said of the process, and its tensors.

    Args:
        step: kept; marked as frozen.
        first_batch: batches that were loaded before the first training act.
    """
    if step.event is not None:
        step.event.synchronize()
    with unseen():
        return _render(step, first_batch)


def _render(step: HeldStep, first_batch: int) -> tuple[Capsule, list[Blob]]:
    tensors = _Tensors()
    absent = list(step.absent)
    batches = tuple(
        Batch(number, _seen(tensors, f"batch {number}/", contents, absent)) for number, contents in list(step.batches)
    )
    calls = tuple(
        Call(
            call.what,
            call.name,
            _seen(tensors, f"call {i}/", call.inputs, absent),
            _seen(tensors, f"call {i} gives/", call.outputs, []),
            _generators(tensors, f"call {i} rng/", call.generators),
        )
        for i, call in enumerate(list(step.calls))
    )
    if step.values is None:
        absent.append(f"state by value: {step.why_not}")
    else:
        absent += step.values.missing + (step.gradients.missing if step.gradients is not None else [])
    capsule = Capsule(
        key="",
        step=step.step,
        by_value=step.values is not None and not step.values.missing and not (step.gradients and step.gradients.missing),
        updates=step.updates,
        first_batch=first_batch,
        batches_before=step.batches_before,
        batches=batches,
        calls=calls,
        generators=_generators(tensors, "rng/", step.generators),
        state=_state(tensors, step, absent),
        groups=() if step.values is None else tuple(step.values.groups),
        absent=tuple(dict.fromkeys(absent))[:200],
    )
    return capsule, tensors.blobs


def _seen(tensors: _Tensors, prefix: str, contents: Iterable[tuple[str, Any]], absent: list[str]) -> tuple[Seen, ...]:
    found = []
    for place, content in contents:
        if not isinstance(content, Held):
            found.append(Seen(place, value=content if is_plain(content) else f"<{type(content).__name__}>"))
            continue
        key, printed, note = tensors.put(prefix + place, content)
        if note:
            absent.append(f"{prefix}{place}: {note}")
        found.append(Seen(place, content.dtype, tuple(content.shape), content.device, printed, key, note=note))
    return tuple(found)


def _state(tensors: _Tensors, step: HeldStep, absent: list[str]) -> tuple[Variable, ...]:
    before, after = last_prints(step.before, step.names), last_prints(step.after, step.names)
    found: dict[tuple[str, str], Variable] = {}
    values = [] if step.values is None else [*step.values.held, *(step.gradients.held if step.gradients else ())]
    for value, held in values:
        slot = value.role, value.name
        if held is None:
            found[slot] = Variable(*slot, value=value.plain, optimizer=value.optimizer)
            continue
        key, printed, note = tensors.put(f"{value.role} {value.name}", held)
        if note:
            absent.append(f"{value.role} {value.name}: {note}")
        found[slot] = Variable(
            *slot, held.dtype, tuple(held.shape), held.device, printed, after.get(slot), key,
            optimizer=value.optimizer, trains=value.trains, note=note,
        )  # fmt: skip
    for slot in (*before, *after):
        if slot not in found:
            printed = before.get(slot) if step.values is None and slot[0] != "gradient" else None
            found[slot] = Variable(*slot, before=printed, after=after.get(slot))
    return tuple(found.values())


def last_prints(seen: LastSeen | None, names: dict[Any, str]) -> dict[tuple[str, str], Print]:
    """Fingerprints by role and name from `StateTracker.seen_last`."""
    found: dict[tuple[str, str], Print] = {}
    for role, (keys, lasts) in ({} if seen is None else seen.by_role()).items():
        for key, last in zip(keys, lasts):
            name = names.get(key) if role != "optimizer" else names.get(key[0])
            if name is None or last is None or last[1] & StateFlag.UNHASHED:
                continue
            found[role, f"{name}[{key[1]!r}]" if role == "optimizer" else name] = _print((last[0], last[2], last[1]))
    return found


def _generators(tensors: _Tensors, prefix: str, states: Iterable[RngState]) -> tuple[Generator, ...]:
    import numpy as np

    found = []
    for state in states:
        if hasattr(state.words, "data_ptr"):
            words = _on_cpu(state.words)
            key = tensors.add(prefix + state.name, "U8", tuple(words.shape), words.numel(), partial(_bytes, words))
        else:
            array = np.frombuffer(state.words, dtype=np.uint32)
            content = partial(_words, array)
            key = tensors.add(prefix + state.name, "U32", array.shape, array.nbytes, content)
        found.append(Generator(state.name, key, state.plain))
    return tuple(found)


def _words(array: Any) -> memoryview:
    return memoryview(array).cast("B")


def _print(summary: tuple[int, float, int]) -> Print:
    fp, norm, flags = summary
    return Print(fp, flags, norm if norm - norm == 0 else None)


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _bytes(tensor: Tensor) -> memoryview:
    import torch

    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else memoryview(b"")
