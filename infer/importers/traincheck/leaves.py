"""TrainCheck's values as our signatures (`invariants.signature`): what other commands see of an imported run.

A value is `{type: plain value}` or `{type: {attribute: value}}`. Addresses are left out, so that calls that look the
same have the same signature.
"""

from __future__ import annotations

import math
import re
from typing import Any, Final

_MAX_ITEMS: Final = 32  # arguments, attributes
_LISTED: Final = 4
_MAX_TEXT: Final = 200
_ADDRESS: Final = re.compile(r"_(TRAINCHECK|ML_DAIKON)_.*")
_SYMBOLS: Final = ("torch.dtype", "dtype", "torch.device", "device", "torch.layout", "torch.memory_format")


def arguments(args: Any, kwargs: Any) -> dict[str, Any]:
    """The signature of a call's arguments."""
    positional = sorted(args, key=_position)[:_MAX_ITEMS] if isinstance(args, dict) else []
    named = list(kwargs.items())[:_MAX_ITEMS] if isinstance(kwargs, dict) else []
    return {"a": [leaf(args[k]) for k in positional], "k": {str(k)[:_MAX_TEXT]: leaf(v) for k, v in named}}


def result(values: Any) -> Any:
    """The signature of a call's result, or results."""
    if isinstance(values, list):
        return {"L": [leaf(v) for v in values[:_LISTED]], "n": len(values)}
    return leaf(values)


def leaf(typed: Any) -> Any:
    """One value."""
    if not isinstance(typed, dict) or not typed:
        return {"e": "unknown"}
    kind, value = next(iter(typed.items()))
    kind = str(kind)[:_MAX_TEXT]
    if isinstance(value, dict):
        return _tensor(kind, value) if "dtype" in value and "shape" in value else _object(kind, value)
    if kind in _SYMBOLS:
        return {"y": str(value)[:_MAX_TEXT]}
    return _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return {"L": [_plain(v) for v in value[:_LISTED]] if all(_simple(v) for v in value) else [], "n": len(value)}
    if isinstance(value, str):
        return value[:_MAX_TEXT]
    return value if _simple(value) else {"e": type(value).__name__}


def _simple(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int):
        return -(1 << 63) <= value < 1 << 63
    return value is None or isinstance(value, str)


def _tensor(kind: str, attributes: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {
        "T": dtype(attributes["dtype"]),
        "s": shape(attributes["shape"]),
        "d": "cuda" if attributes.get("is_cuda") is True else "cpu" if attributes.get("is_cpu") is True else "",
        "g": int(attributes.get("requires_grad") is True),
    }
    if kind.endswith("Parameter"):
        out["c"] = "Parameter"
    return out


def _object(kind: str, attributes: dict[str, Any]) -> dict[str, Any]:
    kept = {
        str(k)[:_MAX_TEXT]: v if not isinstance(v, str) else v[:_MAX_TEXT]
        for k, v in list(attributes.items())[:_MAX_ITEMS]
        if _simple(v) and not _ADDRESS.match(str(k))
    }
    return {"O": kind, "a": kept} if kept else {"O": kind}


def dtype(value: Any) -> str:
    return str(value).removeprefix("torch.")[:_MAX_TEXT]


def shape(value: Any) -> list[int]:
    return [int(n) for n in value[:_MAX_ITEMS] if isinstance(n, int)] if isinstance(value, list) else []


def _position(key: Any) -> tuple[int, str]:
    text = str(key)
    return (int(text), "") if text.isdigit() and len(text) < 9 else (1 << 30, text)
