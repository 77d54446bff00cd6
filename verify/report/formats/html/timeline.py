"""Where violations fall: ranks down, steps across, binned so that 64 ranks and 10,000 steps fit on a page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import polars as pl

from proctor.invariants.invariant import Severity
from proctor.invariants.trace import Trace
from proctor.invariants.verdict import Violation
from proctor.verify.wording import clean, count

COLUMNS: Final = 96
ROWS: Final = 64
_SAMPLED: Final = 250  # a violation that has this many places and more examples was sampled (checker.MAX_PLACES)
_LEFT: Final = 84.0
_TOP: Final = 22.0
_WIDTH: Final = 960.0
_TALLEST: Final = 18.0
_SHORTEST: Final = 9.0


@dataclass(frozen=True)
class Cell:
    x: float
    y: float
    kind: str  # bad, warn: colour; level 1–4: strength
    level: int
    tip: str


@dataclass(frozen=True)
class Row:
    y: float
    label: str
    recorded: float  # width of the bar of steps that were recorded
    missing: bool
    labelled: bool


@dataclass(frozen=True)
class Timeline:
    """Geometry of the picture; the template only draws it."""

    width: float
    height: float
    left: float
    row_height: float
    cell_width: float
    rows: list[Row]
    cells: list[Cell] = field(default_factory=list)
    ticks: list[tuple[float, str]] = field(default_factory=list)
    first: float | None = None  # where the first incident starts
    setup: float | None = None  # right edge of the column before the first step
    summary: str = ""


def timeline(
    trace: Trace | None,
    violations: Sequence[Violation],
    missing: Sequence[int],
    ranks_of: Mapping[str, Sequence[int]] | None = None,
) -> Timeline | None:
    """Lay out the picture; `None` when no step was recorded.

    Args:
        trace: what was recorded.
        violations: what to draw.
        missing: ranks without a record.
        ranks_of: by violation, the ranks that it is about, where those are not the ones on which the rule failed.
    """
    if ranks_of:
        violations = [about(v, ranks_of[v.id]) if v.id in ranks_of else v for v in violations]
    last_steps = _last_steps(trace) if trace is not None else {}
    steps = max([s + 1 for s in last_steps.values()] + [(s or 0) + 1 for v in violations for s, _ in v.places], default=0)
    ranks = sorted({*last_steps, *missing, *(r for v in violations for _, r in v.places if r is not None)})
    if steps < 1 or not ranks:
        return None
    early = any(s is None or s < 0 for v in violations for s, _ in v.places)
    per_column = -(-steps // COLUMNS)
    columns = -(-steps // per_column)
    per_row = -(-len(ranks) // ROWS)
    groups = [ranks[i : i + per_row] for i in range(0, len(ranks), per_row)]
    row_of = {rank: i for i, group in enumerate(groups) for rank in group}
    row_height = min(_TALLEST, max(_SHORTEST, 320 / len(groups)))
    span = _WIDTH - _LEFT
    cell = span / (columns + (1.5 if early else 0))
    origin = _LEFT + (1.5 * cell if early else 0)
    every = 1 if row_height >= 12 else 4
    rows = [
        Row(
            y=_TOP + i * row_height,
            label=f"rank {group[0]}" if len(group) == 1 else f"ranks {group[0]}–{group[-1]}",
            recorded=cell * -(-max((last_steps.get(r, -1) + 1 for r in group), default=0) // per_column),
            missing=all(r in missing for r in group),
            labelled=i % every == 0,
        )
        for i, group in enumerate(groups)
    ]
    heat: dict[tuple[int, int], float] = defaultdict(float)
    worst: dict[tuple[int, int], Severity] = {}
    rules: dict[tuple[int, int], dict[str, str]] = defaultdict(dict)
    for v in violations:
        touched = _columns(v, per_column)
        weight = v.count / max(1, len(touched))
        for column, rank in touched:
            for row in [row_of[rank]] if rank is not None else range(len(groups)):
                at = (column, row)
                heat[at] += weight
                if at not in worst or v.severity.level > worst[at].level:
                    worst[at] = v.severity
                rules[at][v.id] = f"{v.code} {v.text}"
    cells = []
    for (column, row), amount in sorted(heat.items()):
        start = column * per_column
        end = min(start + per_column, steps) - 1
        when = "before the first step" if column < 0 else f"step {start}" if start == end else f"steps {start}–{end}"
        broken = list(rules[column, row].values())
        tip = f"{when}, {rows[row].label}: {count(max(1, round(amount)), 'failing example')}\n" + "\n".join(
            f"· {clean(text, 120)}" for text in broken[:5]
        )
        cells.append(
            Cell(
                x=_LEFT if column < 0 else origin + column * cell,
                y=rows[row].y,
                kind="bad" if worst[column, row].level >= Severity.ERROR.level else "warn",
                level=sum(amount >= edge for edge in (0, 2, 8, 32)),
                tip=tip + (f"\n· and {len(broken) - 5} more" if len(broken) > 5 else ""),
            )
        )
    first = min((c.x for c in cells), default=None)
    return Timeline(
        width=_WIDTH,
        height=_TOP + len(groups) * row_height + 24,
        left=origin,
        row_height=row_height,
        cell_width=cell,
        rows=rows,
        cells=cells,
        ticks=[(origin + (s // per_column) * cell, f"{s:,}") for s in _ticks(steps)],
        first=None if first is None else first + cell / 2,
        setup=origin if early else None,
        summary=f"{count(len(ranks), 'rank')} by {count(steps, 'step')}"
        + (f", {count(per_column, 'step')} a column" if per_column > 1 else "")
        + (f", {count(per_row, 'rank')} a row" if per_row > 1 else ""),
    )


def about(v: Violation, ranks: Sequence[int]) -> Violation:
    """A rule across ranks fails once a step; it is drawn on each of the ranks that it is about."""
    steps = list(dict.fromkeys(step for step, _ in v.places))
    return msgspec.structs.replace(v, places=[(s, r) for s in steps for r in ranks])


def _columns(v: Violation, per_column: int) -> list[tuple[int, int | None]]:
    """Column and rank of each known place; where places are a sample, also the columns between two of a rank."""
    columns = [(-1 if s is None or s < 0 else s // per_column, rank) for s, rank in v.places]
    if not _SAMPLED <= len(v.places) < v.count:
        return columns
    filled: list[tuple[int, int | None]] = []
    previous: dict[int | None, int] = {}
    for column, rank in columns:  # ordered by step
        start = previous.get(rank, column - 1)
        filled += [(c, rank) for c in range(start + 1, column + 1)] or [(column, rank)]
        previous[rank] = column
    return filled


def _ticks(steps: int) -> list[int]:
    """Up to ten round step numbers."""
    size = 1
    while steps / size > 10:
        size = size * 2 if str(size)[0] in "15" else size * 5 // 2
    return list(range(0, steps, size))


def _last_steps(trace: Trace) -> dict[int, int]:
    """Last step each rank recorded."""
    last = trace.contexts.join(trace.procs.select("proc", "rank"), on="proc").group_by("rank").agg(pl.col("step").max())
    return {rank: step for rank, step in last.drop_nulls().iter_rows()}
