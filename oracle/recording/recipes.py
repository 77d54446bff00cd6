"""How values of a generated input are drawn: what a model can take in its place is read off what it does with its own."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from proctor.oracle.merging.reference import Key, Reference
from proctor.oracle.numbers.dtypes import as_float, is_floating
from proctor.oracle.tensors import Entry

if TYPE_CHECKING:
    import torch


class Recipe(NamedTuple):
    """How values are drawn.

    Args:
        text: in words.
        rows: of the embedding that takes them; 0 for real numbers.
        low, high, mean, spread: of real numbers.
    """

    text: str
    rows: int = 0
    low: float = -np.inf
    high: float = np.inf
    mean: float = 0.0
    spread: float = 1.0


def recipe_of(reference: Reference, key: Key, entry: Entry) -> Recipe | str:
    """How an input is drawn; the reason where it stays as it is."""
    values = reference.array(entry)
    if values.size < 2:
        return "it is a single number"
    if not is_floating(entry.dtype):
        if entry.dtype == "bool" or _in_sequence(values):
            return "it is a mask or a sequence of positions"
        rows = [n for n in (_rows(reference, e) for e in _takers(reference, key, entry)) if n]
        return Recipe("any row of the embedding", rows=min(rows)) if rows else "no embedding takes it as it is"
    if entry.dtype.startswith(("complex", "float8")):
        return f"its type is {entry.dtype}"
    real = as_float(values, entry.dtype).astype(np.float64)
    if not np.isfinite(real).all():
        return "it has values that are not finite, as masks have"
    if any(not e.slot and _has_weights(reference, e.name) for e in _takers(reference, key, entry)):
        return Recipe("normal, of order one")
    if real.ndim < 2 or np.isin(real, (0.0, 1.0, real.min())).all():
        return "no layer takes it as it is, and it looks like a mask"
    low, high = float(real.min()), float(real.max())
    return Recipe("normal within its own range", 0, low, high, float(real.mean()), float(real.std()))


def _takers(reference: Reference, key: Key, entry: Entry) -> list[Entry]:
    """Inputs of modules that hold what an input from outside holds, in whatever shape."""
    raw = reference.array(entry).ravel()
    return [
        e
        for k, e in reference.entries.items()
        if k[0] == key[0]
        and k[2] == "input"
        and is_floating(e.dtype) == is_floating(entry.dtype)
        and math.prod(e.shape) == raw.size
        and np.array_equal(reference.array(e).ravel(), raw)
    ]


def _rows(reference: Reference, taker: Entry) -> int:
    """Rows of the table in which a module looks its input up; 0 where it is none."""
    table = reference.entries.get((0, 0, "param", f"{taker.name}.weight".lstrip("."), ""))
    if table is None or len(table.shape) != 2:
        return 0
    shapes = (e.shape for k, e in reference.entries.items() if k[0] == taker.step and k[2] == "output" and k[3] == taker.name)
    return table.shape[0] if any(s == (*taker.shape, table.shape[1]) for s in shapes) else 0


def _has_weights(reference: Reference, module: str) -> bool:
    """Whether a module has parameters of its own, besides those of modules in it."""
    return any(k[2] == "param" and k[3].rpartition(".")[0] == module for k in reference.entries)


def _in_sequence(values: npt.NDArray[Any]) -> bool:
    """Whether values rise or fall by the same amount along a dimension, as positions do."""
    steps = [np.diff(values.astype(np.int64), axis=d) for d in range(values.ndim) if values.shape[d] > 2]
    return any(bool((s == s.ravel()[0]).all()) and s.ravel()[0] != 0 for s in steps)


def drawn(recipe: Recipe, entry: Entry, seed: int, key: Key) -> torch.Tensor:
    """The whole tensor of a key, in its type."""
    import torch

    from proctor.oracle.collect.edges.taps import seed_of

    generator = torch.Generator().manual_seed(seed_of("generated", seed, *key))
    dtype: torch.dtype = getattr(torch, entry.dtype)
    if recipe.rows:
        return torch.randint(0, recipe.rows, entry.shape, generator=generator).to(dtype)
    values = torch.randn(entry.shape, generator=generator, dtype=torch.float64) * recipe.spread + recipe.mean
    return values.clamp(recipe.low, recipe.high).to(dtype)
