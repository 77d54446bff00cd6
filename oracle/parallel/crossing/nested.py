"""Tensors inside the arguments and results of modules: tuples, lists, dicts and transformers' outputs.

A place in a value is a path of indices and keys joined by dots: "0", "hidden_states", "1.key"; "" is the value itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

Change = Callable[[str, torch.Tensor], torch.Tensor]


def changed(value: Any, change: Change, path: str = "") -> Any:  # Any: whatever a module takes or gives
    """The same value with its tensors replaced; the very same object where none is."""
    if isinstance(value, torch.Tensor):
        return change(path, value)
    if isinstance(value, tuple | list):
        new = [changed(one, change, _under(path, str(i))) for i, one in enumerate(value)]
        if all(a is b for a, b in zip(new, value)):
            return value
        return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)
    if isinstance(value, Mapping):
        pairs = {key: changed(one, change, _under(path, str(key))) for key, one in value.items()}
        if all(pairs[key] is value[key] for key in pairs):
            return value
        if type(value) is dict:
            return pairs
        import copy

        found = copy.copy(value)  # an output of transformers: keys that are attributes, too
        for key, one in pairs.items():
            found[key] = one  # type: ignore[index]
        return found
    return value


def _under(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
