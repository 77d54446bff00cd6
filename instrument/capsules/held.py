"""Tensors and plain values of batches and arguments, as they were: copied, fingerprinted, or neither with the reason.

A copy is detached, so no graph stays alive; it draws no random number, and neither modes nor hooks of the user see it.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from proctor.instrument.observe.content import formats, readable, unseen
from proctor.instrument.observe.fingerprint import Summary, fingerprint_all
from proctor.instrument.observe.plainly import held as held_by
from proctor.instrument.observe.plainly import inside, is_tensor, own
from proctor.instrument.observe.refs import TensorRef

if TYPE_CHECKING:
    from torch import Tensor

SMALL: Final = 1 << 18  # bytes of a result that is copied, to be hashed later
HASHED: Final = 64 << 20  # bytes of a CPU tensor that is hashed on the spot
_DEPTH: Final = 5
_ENTRIES: Final = 256  # of one container
_LEAVES: Final = 512  # of one batch or call
_TEXT: Final = 500  # characters of a text that is kept
_PLAIN: Final = (bool, int, float, str, type(None))
_UNTOLD: Final = (-1, -1)  # whether it changed

Leaf = tuple[str, Any]
_Known = tuple["weakref.ref[Any]", tuple[int, int], "Held"]


class Copies(list[Any]):
    """Copies of tensors. A class of its own, so that who looks for lists of the program's (averages of its weights) passes them."""


class Held:
    """A tensor as it was.

    Args:
        tensor: of the user, or a copy of it: only described.
        copy: its content.
    """

    __slots__ = ("_copy", "_dtype", "device", "nbytes", "note", "shape", "summary")

    def __init__(self, tensor: Tensor, copy: Tensor | bytes | None, summary: Summary | None, note: str = "") -> None:
        self._dtype, self.shape = tensor.dtype, tensor.shape
        self._copy, self.summary, self.note = copy, summary, note
        if isinstance(copy, bytes):
            self.device, self.nbytes = "cpu", len(copy)
        else:
            self.device = str(tensor.device.type)
            self.nbytes = 0 if copy is None else int(copy.nbytes)

    @property
    def copy(self) -> Tensor | None:
        if isinstance(self._copy, bytes):
            import torch

            self._copy = torch.frombuffer(bytearray(self._copy), dtype=torch.uint8).view(self._dtype).reshape(self.shape)
        return self._copy

    @property
    def dtype(self) -> str:
        return str(self._dtype).removeprefix("torch.")


def leaves(root: Any, names: bool = False) -> list[Leaf]:
    """Tensors, plain values and objects that are neither, each with its place: `0`, `x['ids']`, `1[0].mask`.

    Args:
        root: a batch, or the arguments of a call as one tuple.
        names: the last element of `root` is a mapping of keyword arguments, whose keys are places themselves.
    """
    found: list[Leaf] = []
    if names:
        *positional, keywords = root
        for i, value in enumerate(positional):
            if is_tensor(value):
                found.append((str(i), value))
            else:
                found += _walk(str(i), value, _DEPTH)
        for key, value in (keywords or {}).items():
            found += _walk(str(key), value, _DEPTH)
    elif is_tensor(root):
        return [("", root)]
    else:
        found += _walk("", root, _DEPTH)
    return found[:_LEAVES]


def is_plain(value: Any) -> bool:
    return type(value) in _PLAIN and (type(value) is not str or len(value) <= _TEXT)


def _walk(place: str, value: Any, depth: int) -> Iterator[Leaf]:
    if is_tensor(value) or type(value) in _PLAIN or depth == 0:
        yield place, value
        return
    for name, item in children(value):
        yield from _walk(f"{place}{name}"[:200], item, depth - 1)


def children(value: Any) -> list[Leaf]:
    """What a container holds; an object that is no container is a leaf of its own."""
    inner = value if issubclass(type(value), dict) else own(value, "data")
    if issubclass(type(inner), dict):  # also `collections.UserDict`, of which tokenizers' batches are
        return [(f"[{key!r}]", item) for key, item in list(dict.items(inner))[:_ENTRIES]]
    several = inside(value)
    if several is not None:
        return [(f"[{i}]", item) for i, item in enumerate(several[:_ENTRIES])]
    attributes = held_by(value)
    if type(attributes) is dict and not callable(value):
        tensors = [(f".{k}", v) for k, v in list(attributes.items())[:_ENTRIES] if is_tensor(v) or type(v) in _PLAIN]
        if tensors:
            return tensors
    return [(f"<{type(value).__name__}>", None)]


class Holder:
    """Copies tensors; the same tensor, unchanged, is copied once a step."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._observed: dict[int, _Known] = {}

    def clear(self) -> None:
        self._known.clear()
        self._observed.clear()

    def hold(self, tensor: Tensor, room: int) -> Held:
        """What is put in: by value where there is room for it; what a graph made only by fingerprint.

        Args:
            tensor: of the user; only read.
            room: bytes that may be copied.
        """
        return self._once(self._known, tensor, True, room)

    def observe(self, tensor: Tensor) -> Held:
        """As `observe`: a loss that a model gives is what `backward` is called on."""
        return self._once(self._observed, tensor, False, SMALL)

    @staticmethod
    def _once(there: dict[int, _Known], tensor: Tensor, put_in: bool, room: int) -> Held:
        now = _state(tensor)
        known = there.get(id(tensor))
        if known is not None and known[1] == now and now is not _UNTOLD and known[0]() is tensor:
            return known[2]
        content = None if put_in and tensor.grad_fn is not None else _bytes(tensor, now[1], min(room, SMALL))
        if content is not None:
            held = Held(tensor, content, None)
        else:
            held = _hold(tensor, room) if put_in else observe(tensor)
        there[id(tensor)] = TensorRef(tensor), now, held
        return held


def _hold(tensor: Tensor, room: int) -> Held:
    plain = readable(tensor)
    if plain is None:
        return Held(tensor, None, None, "its memory cannot be read")
    if tensor.grad_fn is not None:
        return _hashed(tensor, plain)
    size = plain.nbytes
    if size > room:
        held = _hashed(tensor, plain)
        held.note = f"{size} bytes, over the budget"
        return held
    return Held(tensor, clone([plain])[0], None)


def observe(tensor: Tensor) -> Held:
    """What comes out: its content is compared, never put back."""
    plain = readable(tensor)
    if plain is None:
        return Held(tensor, None, None, "its memory cannot be read")
    if plain.nbytes <= SMALL:
        return Held(tensor, clone([plain])[0], None)
    return _hashed(tensor, plain)


def _bytes(tensor: Tensor, address: int, most: int) -> bytes | None:
    """The content of a small tensor of the usual kind; `None`: its copy has to go the long way.

    Does with less what `readable` and `clone` do: behind a forward caches are cold, and every function of torch's that is
    asked takes one or two µs, its copy ten.
    """
    import torch

    if type(tensor) is not torch.Tensor or not tensor.is_cpu or address <= 0 or not tensor.is_contiguous():
        return None
    if tensor.dtype not in formats() or tensor.is_neg() or tensor.is_conj() or tensor.storage_offset():
        return None  # a storage that was freed shows in the address only where a tensor begins with it
    size: int = tensor.nbytes
    return ctypes.string_at(address, size) if 0 < size <= most else None


def _hashed(tensor: Tensor, plain: Tensor) -> Held:
    """Of a tensor on a device nothing is read: that would wait for it."""
    if not plain.is_cpu or plain.nbytes > HASHED:
        return Held(tensor, None, None, "not read: too large, or on a device")
    return Held(tensor, None, fingerprint_all([plain])[0])


def _state(tensor: Tensor) -> tuple[int, int]:
    try:
        return tensor._version, tensor.data_ptr()
    except RuntimeError:  # inference tensors have no version, some subclasses no address
        return _UNTOLD


def clone(tensors: list[Tensor], into: Copies | None = None) -> Copies:
    """Copies of dense tensors, where they lie.

    Args:
        tensors: only read.
        into: copies of earlier contents of the same tensors, whose memory is used again; fresh memory costs more than the
            copy (page faults).
    """
    import torch

    # No mode to turn off, the usual case: `unseen` takes 14 µs, a small copy 3. What is detached enters no graph.
    plainly = torch._C._len_torch_dispatch_stack() == 0
    with torch._C.DisableTorchFunction() if plainly else unseen():
        sources = [t.detach() for t in tensors]
        if into is not None and _fits(sources, into):
            if sources:
                torch._foreach_copy_(into, sources)
            return into
        return Copies(t.clone() for t in sources)


def _fits(sources: list[Tensor], into: list[Tensor]) -> bool:
    return len(sources) == len(into) and all(
        s.shape == t.shape and s.dtype == t.dtype and s.device == t.device and s.stride() == t.stride()
        for s, t in zip(sources, into)
    )
