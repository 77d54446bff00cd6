"""`memory/living.h` in Python: oracle of the native one, and what runs where it was not built."""

from __future__ import annotations

from typing import Any


def living(objects: list[Any], base: type) -> list[Any]:
    """Those whose type is this one or derived of it; `type()` only, so that no proxy's `__class__` runs.

    Args:
        objects: `gc.get_objects()`.
        base: the type.
    """
    return [o for o in objects if issubclass(type(o), base)]


def holders(objects: list[Any], size: int, key: str, kinds: tuple[type, ...], ordered: type) -> list[Any]:
    """Lists, tuples and mappings that may hold one value of some kinds for each of several names.

    Args:
        objects: `gc.get_objects()`.
        size: how many values. A list or a tuple has as many; a mapping may have more.
        key: of one of them in a mapping that has more.
        kinds: types of the values; only the first value is looked at, or that of the key.
        ordered: the type of mapping that is looked at beside `dict`.

    Raises:
        ValueError: a size below 1, or a type that is no kind of `dict`.
    """
    if size < 1:
        raise ValueError("a size of 1 or more is needed")
    if not issubclass(ordered, dict):
        raise ValueError("a kind of dictionary is needed")
    found = []
    for o in objects:
        kind = type(o)
        if kind is list or kind is tuple:
            if len(o) == size and type(o[0]) in kinds:
                found.append(o)
        elif kind is dict or kind is ordered:
            if len(o) == size:
                if type(next(iter(dict.values(o)))) in kinds:
                    found.append(o)
            elif len(o) > size and type(_get(o, key)) in kinds:
                found.append(o)
    return found


def _get(mapping: dict[Any, Any], key: str) -> Any:
    try:
        return dict.get(mapping, key)
    except Exception:  # noqa: BLE001  a key of the program's that looks like ours
        return None
