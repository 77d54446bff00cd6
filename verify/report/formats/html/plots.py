"""Geometry of the curves: small line charts on a shared step axis; the template only draws them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from proctor.verify.series import Curve, Series, extent
from proctor.verify.wording import count

WIDTH: Final = 480.0
HEIGHT: Final = 150.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 50.0, 10.0, 8.0, 20.0
_LOG: Final = 100.0  # greatest over least, from which an axis is logarithmic
_MOST: Final = 1e300  # beyond it an axis would overflow
_BROKEN: Final = 40  # marks of steps without a finite value

_X = Callable[[int], float]  # step → pixels


@dataclass(frozen=True)
class Line:
    label: str
    path: str
    kind: str  # middle, or r0 … r3: a rank


@dataclass(frozen=True)
class Plot:
    """One chart.

    band: between the least and the greatest of all ranks.
    marks: where a value was not finite.
    first: where the first violation is.
    """

    name: str
    title: str
    how: str
    label: str
    last: str
    band: str
    lines: list[Line]
    marks: list[float]
    y_ticks: list[tuple[float, str]]
    x_ticks: list[tuple[float, str]]
    first: float | None
    log: bool
    ranks: int
    width: float = WIDTH
    height: float = HEIGHT
    left: float = _LEFT
    right: float = WIDTH - _RIGHT
    top: float = _TOP
    bottom: float = HEIGHT - _BOTTOM


def plots(found: Sequence[Series], steps: int, first_step: int | None) -> list[Plot]:
    """Lay out the curves that say something: a share that is always whole does not."""
    return [_plot(one, steps, first_step) for one in found if not (one.name == "changed" and _whole(one))]


def _whole(one: Series) -> bool:
    return all(v == 100.0 for c in (one.middle, one.low) if c is not None for v in c.values)


def _plot(one: Series, steps: int, first_step: int | None) -> Plot:
    curves = [one.middle, *(c for c in (one.low, one.high) if c is not None), *one.alone.values()]
    low, high = extent([min(max(v, -_MOST), _MOST) for c in curves for v in c.values]) or (0.0, 1.0)
    log = low > 0 and high / low > _LOG
    axis = _Axis(low, high, log)
    last_step = max(1, steps - 1, *(c.steps[-1] for c in curves if c.steps))

    def x(step: int) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * min(max(step, 0), last_step) / last_step

    alone = [Line(f"rank {rank}", _path(c, x, axis), f"r{i % 4}") for i, (rank, c) in enumerate(one.alone.items())]
    shows_all = len(one.alone) == one.ranks and one.ranks > 1
    lines = alone if shows_all else [Line("median of the ranks" if one.ranks > 1 else "", _path(one.middle, x, axis), "middle"), *alone]
    band = ""
    if not shows_all and one.low is not None and one.high is not None:
        band = _band(one.low, one.high, x, axis)
    broken = sorted({s for c in curves for s, v in zip(c.steps, c.values, strict=True) if not math.isfinite(v)})
    value = one.middle.values[-1] if one.middle.values else math.nan
    over = f" over {count(one.ranks, 'rank')}" if one.ranks > 1 else ""
    return Plot(
        name=one.name,
        title=one.title,
        how=one.how,
        label=f"{one.title} by step{over}: from {_number(one.middle.values[0])} to {_number(value)}{' ' + one.unit if one.unit else ''}",
        last=f"{_number(value)}{' ' + one.unit if one.unit else ''}",
        band=band,
        lines=lines,
        marks=[x(s) for s in broken[:_BROKEN]],
        y_ticks=[(axis.y(v), _number(v)) for v in axis.ticks()],
        x_ticks=[(x(s), f"{s:,}") for s in _round_steps(last_step)],
        first=None if first_step is None or first_step < 0 else x(first_step),
        log=log,
        ranks=one.ranks,
    )


class _Axis:
    """Value → pixels, linear or logarithmic, with round tick values inside."""

    def __init__(self, low: float, high: float, log: bool) -> None:
        self.log = log
        a, b = (math.log10(low), math.log10(high)) if log else (low, high)
        if b - a <= 1e-12 * max(abs(a), abs(b), 1e-300):
            a, b = a - (abs(a) * 0.1 or 1.0), b + (abs(b) * 0.1 or 1.0)
        pad = 0.04 * (b - a)
        self.a, self.b = a - pad, b + pad

    def y(self, value: float) -> float:
        at = math.log10(value) if self.log and value > 0 else self.a if self.log else value
        share = (at - self.a) / (self.b - self.a)
        return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)

    def ticks(self) -> list[float]:
        if self.log:
            first, last = math.ceil(self.a), math.floor(self.b)
            every = max(1, -(-(last - first + 1) // 4))
            return [10.0**e for e in range(first, last + 1, every)]
        size = 10.0 ** math.floor(math.log10((self.b - self.a) / 3))
        size *= next(m for m in (1.0, 2.0, 5.0, 10.0) if (self.b - self.a) / (size * m) <= 4)
        first = math.ceil(self.a / size)
        return [i * size for i in range(first, first + 6) if i * size <= self.b]


def _path(curve: Curve, x: _X, axis: _Axis) -> str:
    """A line, broken where a value is not finite."""
    parts: list[str] = []
    pen = "M"
    for step, value in zip(curve.steps, curve.values, strict=True):
        if not math.isfinite(value):
            pen = "M"
            continue
        parts.append(f"{pen}{x(step):.1f} {axis.y(value):.1f}")
        pen = "L"
    return "".join(parts)


def _band(low: Curve, high: Curve, x: _X, axis: _Axis) -> str:
    points = [(x(s), axis.y(v)) for s, v in zip(low.steps, low.values, strict=True) if math.isfinite(v)]
    back = [(x(s), axis.y(v)) for s, v in zip(high.steps, high.values, strict=True) if math.isfinite(v)]
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in [*points, *reversed(back)]) + "Z" if points and back else ""


def _round_steps(last: int) -> list[int]:
    size = 1
    while last / size > 5:
        size = size * 2 if str(size)[0] in "15" else size * 5 // 2
    return list(range(0, last + 1, size))


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "not finite"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:,.4g}"
    return f"{value:.2g}".replace("e-0", "e-").replace("e+0", "e")
