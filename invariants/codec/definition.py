"""What a user's function or class is, beyond its name: `train` and `Net` of unrelated scripts are not the same thing.

A definition is told by the names that its code uses (attributes, functions, parameters; a class: those of all its methods), not by its
text: another seed, size, depth or option changes none of them, and a small repair changes few. They are kept as a sketch, the
smallest few of their hashes, so that the share of names that two definitions have in common is known from the sketches alone
(bottom-k sketches, Broder 1997), and no name of a user's code leaves the program.

No import beyond the standard library: the training process makes the sketches.
"""

from __future__ import annotations

import types
import zlib
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any, Final

_KEPT: Final = 24  # hashes of a sketch
_DIGITS: Final = 6  # of a hash, hexadecimal
_SAME: Final = 0.5  # share of names in common from which two definitions are one thing
_FEW: Final = 4  # names; fewer say nothing
MAX_CHARS: Final = _KEPT * _DIGITS
_MAX_DEPTH: Final = 4  # of functions in functions


def sketch_of(value: Any) -> str:
    """The sketch of a Python function or class; "" where there is no code to look at."""
    names = set(_of_class(value) if isinstance(value, type) else _of_function(value))
    return _sketch(names) if len(names) >= _FEW else ""


def same(one: str, other: str) -> bool:
    """Whether two sketches are of one thing. What is not known may be."""
    return not one or not other or _alike(one, other)


def foreign(defined: Iterable[tuple[str, Collection[str]]], here: Mapping[str, str]) -> str:
    """The first name that means something else here than where a rule was learned; "" where there is none.

    Args:
        defined: names in a rule, with the sketches of what they were.
        here: sketches of a process by name; what is not in it is not known.
    """
    for name, sketches in defined:
        found = here.get(name, "")
        if found and not any(same(found, known) for known in sketches):
            return name
    return ""


@lru_cache(maxsize=4096)
def _alike(one: str, other: str) -> bool:
    a, b = _hashes(one), _hashes(other)
    smallest = sorted(a | b)[:_KEPT]
    return len(smallest) > 0 and sum(h in a and h in b for h in smallest) >= _SAME * len(smallest)


def _hashes(text: str) -> frozenset[str]:
    return frozenset(text[i : i + _DIGITS] for i in range(0, min(len(text), MAX_CHARS), _DIGITS))


def _sketch(names: Iterable[str]) -> str:
    hashes = {f"{zlib.crc32(name.encode(errors='replace')) >> 8:0{_DIGITS}x}" for name in names}
    return "".join(sorted(hashes)[:_KEPT])


def _of_class(cls: type) -> set[str]:
    found = {base.__name__ for base in cls.__bases__}
    for name, value in list(vars(cls).items()):
        inner = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        if isinstance(inner, types.FunctionType):
            found |= {name, *_of_function(inner)}
    return found


def _of_function(function: Any) -> set[str]:
    for _ in range(_MAX_DEPTH):  # what decorates it
        inner = vars(function).get("__wrapped__")
        if not isinstance(inner, types.FunctionType):
            break
        function = inner
    return _of_code(function.__code__, 0)


def _of_code(code: types.CodeType, depth: int) -> set[str]:
    found = {*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars}
    if depth < _MAX_DEPTH:
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                found |= _of_code(inner, depth + 1)
    return {name for name in found if not name.startswith(".")}
