"""Signatures: what a call was given and what it gave back, as text that is interned once.

The recorder writes a signature as compact JSON. A leaf is one of::

    null, true, 3, 0.1, "mean"                          plain values
    {"T":"float32","s":[32,10],"d":"cpu","g":1,"c":"Parameter","v":"fc.weight"}   tensor: dtype, shape, device,
                                                        requires_grad, class, tracked name (the last three optional);
                                                        "s":null: dimensions left out
    {"M":"torch.nn.Linear","p":"layers.0.fc","t":1}     module: class, path in its root, training flag
    {"L":[leaf,…],"n":12}                               list or tuple: first items, true length
    {"D":{"key":leaf},"n":3}                            mapping
    {"y":"torch.bfloat16"}                              dtype, device, layout
    {"f":"module.function"}                             function or class
    {"O":"module.Class","v":"#0","a":{"low":true}}      other object: tracked name, simple attributes
    {"e":"int"}                                         a value left out (too many distinct ones), with its type

Arguments are `{"a":[leaf,…],"k":{"name":leaf}}`; a result is a leaf. `features` flattens either into
`path.attribute → plain value`, the columns that relations and preconditions speak of.
"""

from __future__ import annotations

import json
from typing import Any

Plain = str | int | float | bool | None

_MAX_DEPTH = 4
_LEFT_OUT = frozenset({"int", "float", "str", "many"})


def parse(text: str) -> Any:
    """The decoded signature; `None` for an empty one or one that is not JSON (a torn write)."""
    if not text:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def features(text: str) -> dict[str, Plain]:
    """Flatten a signature: `{"0.dtype": "float32", "0.shape[0]": 32, "group.type": "…"}`.

    Positional arguments are named by position, keyword arguments by name, a result by `out`.
    """
    tree = parse(text.replace("__mp_main__.", "__main__."))  # the script, as a spawned child imports it
    out: dict[str, Plain] = {}
    if isinstance(tree, dict) and "a" in tree and "k" in tree:
        for i, leaf in enumerate(tree["a"]):
            _flatten(str(i), leaf, out, 0)
        for key, leaf in tree["k"].items():
            _flatten(key, leaf, out, 0)
    elif text:
        _flatten("out", tree, out, 0)
    return out


def left_out(text: str) -> frozenset[str]:
    """Features that a call had and its signature does not tell, since the function had too many distinct ones: `{"0.value"}`.

    `0.shape` stands for all dimensions of a tensor and how many there are, "" for everything.
    """
    if '"e":' not in text and '"s":null' not in text:
        return frozenset()
    tree = parse(text)
    if tree == {"e": "many"}:
        return frozenset({""})
    missing: set[str] = set()
    if isinstance(tree, dict) and "a" in tree and "k" in tree:
        for path, leaf in [*((str(i), leaf) for i, leaf in enumerate(tree["a"])), *tree["k"].items()]:
            _missing(path, leaf, missing, 0)
    else:
        _missing("out", tree, missing, 0)
    return frozenset(missing)


def _missing(path: str, leaf: Any, found: set[str], depth: int) -> None:
    if not isinstance(leaf, dict) or depth > _MAX_DEPTH:
        return
    if "T" in leaf and leaf.get("s", ()) is None:
        found.add(f"{path}.shape")
    elif leaf.get("e") in _LEFT_OUT:
        found.add(f"{path}.value")
    elif "L" in leaf:
        for i, item in enumerate(leaf["L"][:4]):
            _missing(f"{path}[{i}]", item, found, depth + 1)
    elif "D" in leaf:
        for key, item in leaf["D"].items():
            _missing(f"{path}[{key!r}]", item, found, depth + 1)


def outline(text: str) -> str:
    """What a signature says but for numbers, of which only the kind is kept, and whether they are zero: sizes of tensors, plain
    numbers, attributes.

    How many items something has is no such number.
    """
    return repr({place: value if place.endswith((".ndim", ".len")) else _vague(value) for place, value in features(text).items()})


def _vague(value: Plain) -> Plain:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return type(value).__name__ if value else f"{type(value).__name__} 0"


def _flatten(path: str, leaf: Any, out: dict[str, Plain], depth: int) -> None:
    if depth > _MAX_DEPTH:
        return
    if not isinstance(leaf, dict):
        out[f"{path}.value"] = leaf
        out[f"{path}.type"] = type(leaf).__name__
        return
    if "T" in leaf:
        shape = leaf.get("s", [])
        told, shape = shape is not None, shape or []
        out[f"{path}.type"] = leaf.get("c", "Tensor")
        out[f"{path}.dtype"] = leaf["T"]
        if told:
            out[f"{path}.ndim"] = len(shape)
        out[f"{path}.device"] = leaf.get("d", "")
        out[f"{path}.requires_grad"] = bool(leaf.get("g", 0))
        for i, n in enumerate(shape[:6]):
            out[f"{path}.shape[{i}]"] = n
        if "v" in leaf:
            out[f"{path}.name"] = leaf["v"]
    elif "M" in leaf:
        out[f"{path}.type"] = leaf["M"]
        out[f"{path}.path"] = leaf.get("p", "")
        if "t" in leaf:  # a wrapper may have no flag of its own
            out[f"{path}.training"] = bool(leaf["t"])
    elif "L" in leaf:
        out[f"{path}.type"] = "sequence"
        out[f"{path}.len"] = leaf.get("n", len(leaf["L"]))
        for i, item in enumerate(leaf["L"][:4]):
            _flatten(f"{path}[{i}]", item, out, depth + 1)
    elif "D" in leaf:
        out[f"{path}.type"] = "mapping"
        out[f"{path}.len"] = leaf.get("n", len(leaf["D"]))
        for key, item in leaf["D"].items():
            _flatten(f"{path}[{key!r}]", item, out, depth + 1)
    elif "O" in leaf:
        out[f"{path}.type"] = leaf["O"]
        if "v" in leaf:
            out[f"{path}.name"] = leaf["v"]
        if "n" in leaf:
            out[f"{path}.len"] = leaf["n"]
        for key, value in leaf.get("a", {}).items():
            out[f"{path}.{key}"] = value
    elif "y" in leaf:
        out[f"{path}.value"] = leaf["y"]
        out[f"{path}.type"] = "constant"
    elif "f" in leaf:
        out[f"{path}.value"] = leaf["f"]
        out[f"{path}.type"] = "function"
    elif "e" in leaf:
        out[f"{path}.type"] = leaf["e"]
