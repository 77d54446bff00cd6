"""Names of a model as patterns of a plan: layers of a kind are one rule."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import torch

_DOT: Final = r"\."
_NOTHING: Final = torch.nn.Module()  # has no children: what comes after a parameter's name


def pattern_of(name: str, model: torch.nn.Module) -> str:
    """ "layers.0.fc1" → 'layers\\.\\d+\\.fc1', where all that `layers` holds is of one class; else the number stays.

    Args:
        name: of a module or parameter; "" for the model.
        model: has it.
    """
    found, here = [], model
    for part in name.split(".") if name else ():
        inside = here._modules
        alike = part.isdigit() and len({type(child) for child in inside.values()}) == 1
        found.append(r"\d+" if alike else re.escape(part))
        here = inside.get(part) or _NOTHING
    return _DOT.join(found)


def slot_of(place: str) -> str:
    """A pattern for a place in nested values: numbers are any number."""
    return _DOT.join(r"\d+" if part.isdigit() else re.escape(part) for part in place.split("."))


def slots_of(places: Iterable[str], others: Iterable[str]) -> str:
    """One pattern for places; numbers are any number where that takes none of the others with it."""
    places = list(places)
    pattern = joined(slot_of(place) for place in places)
    return "|".join(map(re.escape, places)) if any(re.fullmatch(pattern, other) for other in others) else pattern


def glob(name: str) -> str:
    """A pattern with "*" for a part of a path, as transformers and torch write it."""
    return _DOT.join(r"\d+" if part == "*" else re.escape(part).replace(r"\*", r"[^.]*") for part in name.split("."))


def joined(patterns: Iterable[str]) -> str:
    """One pattern for several, each once; what all begin and end with is written once: 'layers\\.\\d+\\.(fc1|fc2)\\.weight'."""
    every = [pattern.split(_DOT) for pattern in dict.fromkeys(patterns)]
    if len(every) == 1 or any("|" in part for parts in every for part in parts):
        return "|".join(_DOT.join(parts) for parts in every)
    least = min(map(len, every)) - 1
    begin = next((i for i in range(least) if len({parts[i] for parts in every}) > 1), least)
    end = next((i for i in range(least - begin) if len({parts[-1 - i] for parts in every}) > 1), least - begin)
    middle = "|".join(_DOT.join(parts[begin : len(parts) - end]) for parts in every)
    return _DOT.join([*every[0][:begin], f"({middle})", *(every[0][len(every[0]) - end :])])
