"""Values of TrainCheck's records: as texts that conditions compare, and as its checker compares them.

A text is JSON, so that the text "1" and the number 1 differ, with whole floats as integers and integers as exact as
floats are, because a column of integers turns into floats in TrainCheck wherever a record lacks it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

# Two lists of integers (shapes) count as the same argument from this share of common members on.
_MIN_OVERLAP: Final = 0.1
_EXACT: Final = 1 << 53
_FLOAT_TOLERANCE: Final = 1e-8
_GENERAL: Final[Mapping[str, Callable[[float], bool]]] = {
    "above_zero": lambda v: v > 0,
    "below_zero": lambda v: v < 0,
    "non_positive": lambda v: v <= 0,
    "non_negative": lambda v: v >= 0,
    "non_zero": lambda v: v != 0,
}


def is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def text_of(value: Any) -> str | None:
    """The text of a plain value; null for what a condition cannot speak of: lists, mappings and NaN."""
    if isinstance(value, (list, dict)) or is_nan(value):
        return None
    return json.dumps(_normal(value))


def identity(value: Any) -> str | None:
    """A text that is equal for equal values, also of lists and mappings; null for NaN, which means "not recorded"."""
    return None if is_nan(value) else json.dumps(_normal(value), sort_keys=True)


def _normal(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if type(value) is int and abs(value) > _EXACT:
        return int(float(value))
    if isinstance(value, list):
        return [_normal(v) for v in value]
    if isinstance(value, dict):
        return {str(k): _normal(v) for k, v in value.items()}
    return value


def matches(expected: Any, value: Any) -> bool:
    """Whether a value is the expected one, or of the class of values that the expectation names, such as `non_zero`."""
    if identity(expected) == identity(value):
        return True
    if not isinstance(expected, str):
        return False
    if expected == "anything":
        return True
    if expected == "non_none":
        return value is not None
    test = _GENERAL.get(expected)
    if test is None:
        return False
    if value is None:
        return expected in ("non_positive", "non_negative")
    return isinstance(value, (int, float)) and test(value)


def alike(a: Any, b: Any) -> bool:
    """Whether two arguments count as the same one."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list):
        if all(isinstance(v, int) for v in a) and all(isinstance(v, int) for v in b):
            union = set(a) | set(b)
            return bool(union) and len(set(a) & set(b)) / len(union) >= _MIN_OVERLAP
        return len(a) == len(b) and all(alike(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return len(a) == len(b) and all(k in b and alike(v, b[k]) for k, v in a.items())
    if isinstance(a, float):
        return abs(a - float(b)) < _FLOAT_TOLERANCE
    return bool(a == b)


def skeleton(value: Any) -> Any:
    """What two values must share to be `alike`: everything but floats and lists of integers."""
    if isinstance(value, dict):
        return {k: skeleton(v) for k, v in value.items()}
    if isinstance(value, list):
        return "ints" if all(isinstance(v, int) for v in value) else [skeleton(v) for v in value]
    if isinstance(value, float):
        return "float"
    return [type(value).__name__, value]
