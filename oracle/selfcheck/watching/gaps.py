"""How far two sets of tensors are apart, beside what rounding does to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from proctor.oracle.selfcheck.watching.values import UNIT, difference

MULTIPLE: Final = 3.0  # of the estimate, as everywhere in the oracle
FLOOR: Final = 4.0  # unit roundoffs: of what noise does not move


@dataclass(frozen=True)
class Gap:
    """How far two sets of tensors are from each other, at the worst.

    Attributes:
        name: of the worst tensor.
        error: relative to its size.
        tolerance: likewise.
        ratio: error over tolerance; above 1 it is no rounding.
    """

    name: str = ""
    error: float = 0.0
    tolerance: float = 0.0
    ratio: float = 0.0


def gap(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], noise: Callable[[], Sequence[Mapping[str, torch.Tensor]]] | None = None, *, terms: int = 1) -> Gap:
    """The worst difference of tensors of one name; noise is asked for only where there is any.

    Args:
        one: trusted.
        other: judged.
        noise: samples of `one`; without, a few roundings are allowed.
        terms: how many numbers are added up to one, in another order in `other`. Noise at the edges of modules does not reach such a sum: its roundings
            grow with the square root of the terms (Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019).
    """
    apart = {n: difference(one[n], other[n]) for n in one if n in other}
    if not any(error for error, _ in apart.values()):
        return Gap(next(iter(apart), ""))
    samples = noise() if noise is not None else []
    worst = Gap()
    whole = max((size for n, (_, size) in apart.items() if one[n].is_floating_point()), default=0.0)
    for name, (error, size) in apart.items():
        if not error:
            continue
        floor = max(FLOOR, MULTIPLE * terms**0.5) * UNIT.get(one[name].dtype, 0.0) * max(size, 1e-3 * whole if noise is not None else 0.0)
        seen = [difference(one[name], s[name])[0] for s in samples if name in s]
        spread = (sum(e * e for e in seen) / len(seen)) ** 0.5 if seen else 0.0
        allowed = max(MULTIPLE * spread, floor)
        ratio = error / allowed if allowed > 0 else float("inf")
        if ratio > worst.ratio:
            worst = Gap(name, error / size if size else float("inf"), allowed / size if size else float("inf"), ratio)
    return worst
