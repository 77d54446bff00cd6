"""The states of the process's random generators: read without drawing, and set again.

torch on the CPU and on each CUDA device in use, Python's `random`, numpy's legacy generator.

`read` asks the generators (6 µs for Python's, 29 for numpy's, which goes word by word; several times that with cold
caches). `Reader` copies the words from where they lie, 2,500 bytes each, and makes nothing new where nothing was drawn.
The places are not promised by CPython and numpy, so each is tried first against what the generator itself says, and
`read` serves where that is not the same.
"""

from __future__ import annotations

import array
import ctypes
import random
import struct
import sys
from typing import Any, Final, NamedTuple

from proctor.invariants.capsule import Plain

OF_PROGRAM: Final = ("python", "numpy")  # from which no layer draws
PYTHON_WORDS: Final = 625  # 624 of the state and the position
_WORD: Final = 4
_BYTES: Final = PYTHON_WORDS * _WORD
_GAUSS: Final = struct.Struct("=i4xd")  # of numpy's `aug_bitgen_t`, behind a pointer: whether there is one, and its value
_MARK: Final = 0.7390851332151607  # a number that stands in no generator by chance


class RngState(NamedTuple):
    """One generator: its words (a tensor, or bytes of unsigned words) and what else its state consists of."""

    name: str
    words: Any
    plain: dict[str, Plain]


def read(everything: bool = True) -> list[RngState]:
    """States now, as the generators say them.

    Args:
        everything: also Python's and numpy's; else those that layers draw from.
    """
    import torch

    found = _torch(torch.default_generator, torch.cuda)
    if everything:
        found.append(_python())
        found += _legacy()
    return found


class Reader:
    """Reads states again and again. One that did not change is the same object as before."""

    def __init__(self) -> None:
        import torch

        self._default: Any = torch.default_generator
        self._cuda: Any = torch.cuda if has_cuda() else None
        self._inst: Any = getattr(random, "_inst", None)
        self._python = _python_memory(self._inst)
        self._raw_python = b""
        self._last_python: RngState | None = None
        self._legacy: Any = None
        self._bits: Any = None  # numpy's generator of bits, which can be exchanged
        self._numpy: _NumpyMemory | None = None
        self._raw_numpy = b""
        self._last_numpy: RngState | None = None

    def read(self, everything: bool = True) -> list[RngState]:
        """As `read`."""
        found = _torch(self._default, self._cuda)
        if everything:
            found.append(self._read_python())
            found += self._read_numpy()
        return found

    def _read_python(self) -> RngState:
        inst: Any = getattr(random, "_inst", None)
        if self._python is None or inst is not self._inst:
            return _python()
        raw, gauss, last = self._python.raw, inst.gauss_next, self._last_python
        if last is None or raw != self._raw_python or last.plain["gauss"] != gauss:
            last = RngState("python", raw[_WORD:] + raw[:_WORD], {"gauss": gauss})
            self._raw_python, self._last_python = raw, last
        return last

    def _read_numpy(self) -> list[RngState]:
        legacy = _numpy()
        if legacy is None:
            return []
        bits = getattr(legacy, "_bit_generator", None)
        if legacy is not self._legacy or bits is not self._bits:
            self._legacy, self._bits = legacy, bits
            self._numpy, self._last_numpy = _numpy_memory(legacy), None
        if self._numpy is None:
            return _legacy()
        raw, spare, last = self._numpy.words.raw, self._numpy.gauss.raw, self._last_numpy
        if last is None or raw + spare != self._raw_numpy:
            self._raw_numpy = raw + spare
            last = self._last_numpy = RngState("numpy", raw[:-_WORD], _numpy_plain(raw, spare))
        return [last]


def has_cuda() -> bool:
    """Whether this torch was built for CUDA or ROCm."""
    import torch

    return bool(torch.version.cuda or getattr(torch.version, "hip", None))


def _torch(default: Any, cuda: Any) -> list[RngState]:
    found = [RngState("torch", default.get_state(), {})]
    if cuda is not None and cuda.is_initialized():
        for i, generator in enumerate(cuda.default_generators):
            found.append(RngState(f"cuda:{i}", generator.get_state(), {}))
    return found


def _python() -> RngState:
    _, words, gauss = random.getstate()
    return RngState("python", array.array("I", words).tobytes(), {"gauss": gauss})


def _legacy() -> list[RngState]:
    """numpy's; nothing where it is not loaded, or is of another kind."""
    legacy = _numpy()
    state = legacy.get_state(legacy=False) if legacy is not None else {}
    if state.get("bit_generator") != "MT19937":
        return []
    inner = state["state"]
    plain: dict[str, Plain] = {
        "pos": int(inner["pos"]),
        "has_gauss": int(state["has_gauss"]),
        "gauss": float(state["gauss"]),
    }
    return [RngState("numpy", inner["key"].tobytes(), plain)]


# ---- where the words lie ---------------------------------------------------------------------------------------------


class _NumpyMemory(NamedTuple):
    words: Any  # ctypes arrays: 624 words and the position
    gauss: Any


def _python_memory(inst: Any) -> Any:
    """Position and words of Python's generator; None where they are not where CPython has them."""
    if sys.implementation.name != "cpython" or not isinstance(inst, random.Random):
        return None
    import _random

    start = object.__basicsize__
    if _random.Random.__basicsize__ < start + _BYTES or array.array("I").itemsize != _WORD:
        return None
    found = (ctypes.c_char * _BYTES).from_address(id(inst) + start)
    raw = found.raw
    return found if raw[_WORD:] + raw[:_WORD] == _python().words else None


def _numpy_memory(legacy: Any) -> _NumpyMemory | None:
    """Words, position and spare normal number of numpy's generator; None where they cannot be found."""
    if sys.implementation.name != "cpython":
        return None
    try:
        if type(legacy._bit_generator).__name__ != "MT19937":
            return None
        words = (ctypes.c_char * _BYTES).from_address(legacy._bit_generator.ctypes.state_address)
        offset = _gauss_offset(type(legacy))
    except (AttributeError, TypeError, ValueError):
        return None
    if offset is None:
        return None
    found = _NumpyMemory(words, (ctypes.c_char * _GAUSS.size).from_address(id(legacy) + offset))
    said = _legacy()[0]
    raw = words.raw
    return found if said.words == raw[:-_WORD] and said.plain == _numpy_plain(raw, found.gauss.raw) else None


def _numpy_plain(raw: bytes, spare: bytes) -> dict[str, Plain]:
    has_gauss, gauss = _GAUSS.unpack(spare)
    return {"pos": int.from_bytes(raw[-_WORD:], sys.byteorder), "has_gauss": has_gauss, "gauss": gauss}


def _gauss_offset(kind: Any) -> int | None:
    """Where an object of numpy's keeps the second of a pair of normal numbers, found out on one of our own."""
    ours = kind(0)
    memory = (ctypes.c_char * kind.__basicsize__).from_address(id(ours))
    state = ours.get_state(legacy=False)
    places = set()
    for has in (1, 0):
        ours.set_state({**state, "has_gauss": has, "gauss": _MARK})
        places.add(memory.raw.find(_GAUSS.pack(has, _MARK)))
    return places.pop() if len(places) == 1 and -1 not in places else None


# ---- back again ------------------------------------------------------------------------------------------------------


def write(state: RngState) -> bool:
    """Set one generator; False where this process has none of that name.

    Args:
        state: its words as they were read, or as any other buffer of unsigned words.

    Raises:
        ValueError, TypeError, RuntimeError: the state is not one of that generator.
    """
    import torch

    if state.name == "torch":
        torch.default_generator.set_state(state.words)
    elif state.name.startswith("cuda:"):
        index = int(state.name.partition(":")[2])
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            return False
        torch.cuda.init()
        torch.cuda.default_generators[index].set_state(state.words)
    elif state.name == "python":
        gauss = state.plain.get("gauss")
        random.setstate((3, tuple(_numbers(state.words)), None if gauss is None else float(gauss)))
    elif state.name == "numpy":
        legacy = _numpy()
        if legacy is None:
            return False
        legacy.set_state(
            {
                "bit_generator": "MT19937",
                "state": {"key": _numbers(state.words), "pos": int(state.plain.get("pos") or 0)},
                "has_gauss": int(state.plain.get("has_gauss") or 0),
                "gauss": float(state.plain.get("gauss") or 0.0),
            }
        )
    else:
        return False
    return True


def _numbers(words: Any) -> list[int]:
    return memoryview(words).cast("B").cast("I").tolist()


def _numpy() -> Any:
    module = sys.modules.get("numpy.random")
    return getattr(getattr(module, "mtrand", None), "_rand", None)
