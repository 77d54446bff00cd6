"""Geometry of the picture: error over tolerance along the dataflow, one series a kind; the template only draws it.

A wrong tensor stands out twice: above the line where error and tolerance are equal, and as the step of a curve that was flat
until then. Growth with depth (TTrace, figures 8 and 9) is seen as the slope of a curve.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from proctor.oracle.judging.verdicts import FAILING, TensorVerdict
from proctor.oracle.numbers.tolerance import WARN
from proctor.oracle.report._wording import clean, count, kind, multiple, number, when

WIDTH: Final = 1030.0
HEIGHT: Final = 340.0
LEFT, RIGHT, TOP, BOTTOM = 58.0, 14.0, 30.0, 46.0
MAX_POINTS: Final = 1500
_FLOOR: Final = 1e-3  # ratio at the foot of the axis
_CEILING: Final = 1e9
_GAP: Final = 0.6  # tensors' widths between two phases
_MAX_BANDS: Final = 16  # beyond that, phases have no room for a label
_ROOM: Final = 5.6  # pixels a letter

SERIES: Final = {  # of each kind
    "param": "state",
    "input": "forward",
    "output": "forward",
    "scalar": "scalar",
    "grad_output": "backward",
    "grad_input": "backward",
    "main_grad": "gradient",
    "opt_state": "state",
    "param_after": "state",
}
LEGEND: Final = (
    ("forward", "activations"),
    ("backward", "activation gradients"),
    ("gradient", "parameter gradients"),
    ("state", "parameters and optimizer state"),
    ("scalar", "scalars"),
    ("other", "others"),
)
_PHASE: Final = {
    "forward": ("forward", "fwd"),
    "backward": ("backward", "bwd"),
    "gradient": ("parameter gradients", "grads"),
    "state": ("update", "upd"),
    "scalar": ("", ""),
    "other": ("", ""),
}


@dataclass(frozen=True)
class Dot:
    x: float
    y: float
    series: str
    word: str  # its verdict
    tip: str
    href: str


@dataclass(frozen=True)
class Band:
    x: float
    width: float
    label: str
    odd: bool


@dataclass(frozen=True)
class Picture:
    """The chart. `first` is where the first wrong tensor is, `one` the height at which error and tolerance are equal."""

    dots: list[Dot]
    lines: list[tuple[str, str]]  # series, path
    bands: list[Band]
    y_ticks: list[tuple[float, str]]
    series: list[tuple[str, str]]
    one: float
    warn: float
    first: tuple[float, float, str, str] | None  # x, y, label, anchor
    summary: str
    left: float = LEFT
    right: float = WIDTH - RIGHT
    top: float = TOP
    bottom: float = HEIGHT - BOTTOM
    width: float = WIDTH
    height: float = HEIGHT


def picture(tensors: Sequence[TensorVerdict], first: TensorVerdict | None, rows: dict[TensorVerdict, str]) -> Picture | None:
    """Lay out the compared tensors, which come in the order of the dataflow.

    Args:
        tensors: of a verdict.
        first: the first wrong one.
        rows: id of the table row of a tensor, for those that have one.
    """
    compared = [t for t in tensors if t.verdict != "unmapped"]
    if len(compared) < 2:
        return None
    shown = _thinned(compared, first)
    spots = _spots(shown)
    top = max((t.ratio for t in shown if math.isfinite(t.ratio)), default=1.0)
    high = math.log10(min(max(top, 3.0), _CEILING)) + 0.35
    low = math.log10(_FLOOR)
    infinite = any(not math.isfinite(t.ratio) for t in shown)

    def y(ratio: float) -> float:
        if not math.isfinite(ratio):
            return TOP + 5
        at = math.log10(min(max(ratio, _FLOOR), _CEILING))
        head = TOP + (16 if infinite else 0)
        return HEIGHT - BOTTOM - (at - low) / (high - low) * (HEIGHT - BOTTOM - head)

    dots, lines = [], []
    path: list[str] = []
    before: tuple[str, int, int] | None = None
    for t, x in zip(shown, spots, strict=True):
        series = _series(t)
        band = (series, t.step, _phase_of(t))
        at = y(t.ratio)
        if band != before and path:
            lines.append((before[0] if before else "", "".join(path)))
            path = []
        before = band
        path.append(f"{'L' if path else 'M'}{x:.1f} {at:.1f}")
        tip = f"{t.name} {kind(t)}, {when(t)}: {_value(t)}"
        dots.append(Dot(x, at, series, t.verdict, clean(tip, 240), rows.get(t, "")))
    if path and before is not None:
        lines.append((before[0], "".join(path)))
    lines = [(s, p) for s, p in lines if "L" in p]
    used = {d.series for d in dots}
    legend = [(name, words) for name, words in LEGEND if name in used]
    mark = None
    if first is not None and first in shown:
        i = shown.index(first)
        text = clean(first.name, 60)
        right = spots[i] + 12 + len(text) * _ROOM > WIDTH - RIGHT
        mark = (spots[i], y(first.ratio), text, "end" if right else "start")
    return Picture(
        dots=[d for d in dots if d.word not in FAILING] + [d for d in dots if d.word in FAILING],
        lines=lines,
        bands=_bands(shown, spots),
        y_ticks=_ticks(low, high, y) + ([(TOP + 5, "∞")] if infinite else []),
        series=legend,
        one=y(1.0),
        warn=y(WARN),
        first=mark,
        summary=_summary(compared, shown),
    )


def _value(t: TensorVerdict) -> str:
    if t.verdict in ("missing", "shape", "nonfinite"):
        return f"{t.verdict}{f', {t.note}' if t.note else ''}"
    if t.abs_err == 0:
        return "exactly equal"
    return f"{multiple(t.ratio)} its tolerance, {number(t.rel_err)} of its norm ({t.verdict})"


def _series(t: TensorVerdict) -> str:
    return SERIES.get(t.kind, "other")


def _phase_of(t: TensorVerdict) -> int:
    """Parameters before a step and state after it are one series, and two curves."""
    return 0 if t.kind == "param" else 1


def _thinned(tensors: Sequence[TensorVerdict], first: TensorVerdict | None) -> list[TensorVerdict]:
    """At most `MAX_POINTS`: of neighbours the one with the largest ratio."""
    if len(tensors) <= MAX_POINTS:
        return list(tensors)
    each = -(-len(tensors) // MAX_POINTS)
    kept: list[TensorVerdict] = []
    group: list[TensorVerdict] = []
    for t in tensors:
        if group and (len(group) == each or _series(group[0]) != _series(t)):
            kept.append(_heaviest(group, first))
            group = []
        group.append(t)
    kept.append(_heaviest(group, first))
    return kept


def _heaviest(group: Sequence[TensorVerdict], first: TensorVerdict | None) -> TensorVerdict:
    return next((t for t in group if t is first), None) or max(group, key=lambda t: t.ratio)


def _spots(tensors: Sequence[TensorVerdict]) -> list[float]:
    """x of each tensor, with a gap where a phase begins."""
    at, places = 0.0, []
    before = None
    for t in tensors:
        band = (t.step, _series(t), _phase_of(t))
        if before is not None and band != before:
            at += _GAP
        before = band
        places.append(at)
        at += 1.0
    span = max(places[-1], 1.0)
    pad = 12.0
    return [LEFT + pad + p / span * (WIDTH - LEFT - RIGHT - 2 * pad) for p in places]


def _bands(tensors: Sequence[TensorVerdict], spots: Sequence[float]) -> list[Band]:
    runs: list[tuple[int, str, float, float]] = []
    for t, x in zip(tensors, spots, strict=True):
        series = _series(t)
        if runs and (runs[-1][0] == t.step and series in (runs[-1][1], "scalar", "other")):
            runs[-1] = (*runs[-1][:3], x)
        else:
            runs.append((t.step, series, x, x))
    steps = len({r[0] for r in runs}) > 1
    edges = [LEFT, *((a[3] + b[2]) / 2 for a, b in itertools.pairwise(runs)), WIDTH - RIGHT]
    found = []
    for i, (step, series, _, _) in enumerate(runs):
        width = edges[i + 1] - edges[i]
        label = ""
        if len(runs) <= _MAX_BANDS:
            for word in _PHASE[series]:
                full = f"{word} {step}" if steps and word else word
                if full and len(full) * _ROOM < width:
                    label = full
                    break
        found.append(Band(edges[i], width, label, i % 2 == 0))
    return found


def _ticks(low: float, high: float, y: Callable[[float], float]) -> list[tuple[float, str]]:
    first, last = math.ceil(low), math.floor(high)
    every = max(1, -(-(last - first + 1) // 7))
    exponents = sorted({0, *range(0, last + 1, every), *range(0, first - 1, -every)})
    words = {-3: "0.001", -2: "0.01", -1: "0.1", 0: "1", 1: "10", 2: "100", 3: "1,000"}
    return [(y(10.0**e), words.get(e, f"1e{e}")) for e in exponents if low <= e <= high]


def _summary(compared: Sequence[TensorVerdict], shown: Sequence[TensorVerdict]) -> str:
    text = f"{count(len(compared), 'tensor')} in the order of the dataflow; those at the foot are exactly equal or below a thousandth of their tolerance"
    return text + (f"; of {-(-len(compared) // len(shown))} neighbours the worst is drawn" if len(shown) < len(compared) else "")
