"""What a run is: processes, steps, records, what was called and tracked, and what was lost."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import polars as pl

from proctor.invariants.trace import Trace
from proctor.verify.series import named_loss
from proctor.verify.wording import clean, count, ranges

TOP: Final = 12  # functions listed
_NS: Final = 1e9


@dataclass(frozen=True)
class Summary:
    """Facts of a run, ready to be shown.

    facts: label and text.
    functions: name, calls, seconds inside (nested calls included).
    variables: module class, role, tensors, attributes tracked.
    loss: (step, value) pairs that the user named through `proctor.meta(loss=…)`.
    """

    facts: list[tuple[str, str]]
    functions: list[tuple[str, int, float]]
    variables: list[tuple[str, str, int, str]]
    loss: list[tuple[int, float]]
    dropped: int


def summarise(trace: Trace, info: Mapping[str, Any]) -> Summary:
    """Sum up a run."""
    dropped = sum(p.dropped for p in trace.processes)
    functions = _functions(trace)
    return Summary(_facts(trace, info, dropped), functions, _variables(trace), named_loss(trace), dropped)


def command(info: Mapping[str, Any]) -> str:
    """The user's command line as they typed it."""
    given = info.get("command") or info.get("argv") or ""
    return clean(shlex.join(map(str, given)) if isinstance(given, list) else given)


def started(info: Mapping[str, Any]) -> str:
    """When the run began, as recorded."""
    value = info.get("started") or info.get("start") or info.get("time") or ""
    if isinstance(value, int | float) and not isinstance(value, bool):
        from datetime import UTC, datetime

        try:
            return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        except (OverflowError, ValueError, OSError):
            return ""
    return clean(value, 60)


def _facts(trace: Trace, info: Mapping[str, Any], dropped: int) -> list[tuple[str, str]]:
    processes = trace.processes
    worlds = sorted({p.world for p in processes})
    phases = _phases(trace)
    seconds = _seconds(trace)
    finished = sum(p.finished for p in processes)
    facts = [
        ("Command", command(info)),
        ("Program", ", ".join(sorted(clean(p) for p in trace.programs))),
        ("Started", started(info)),
        ("torch", clean(info.get("torch", ""), 60)),
        (
            "Processes",
            f"{count(len(processes), 'process', 'processes')}, "
            f"{'rank' if len({p.rank for p in processes}) == 1 else 'ranks'} {ranges(p.rank for p in processes)} "
            f"of {', '.join(map(str, worlds))}; {finished} finished"
            if processes
            else "none: nothing was recorded",
        ),
        ("Mesh", _mesh(trace)),
        ("Steps", _steps(trace)),
        ("Phases", ", ".join(f"{clean(phase)} {n:,}" for phase, n in phases)),
        ("Records", f"{count(trace.calls.height, 'call')}, {count(trace.states.height, 'state')}"),
        ("Recorded for", f"{seconds:,.1f} s" if seconds else ""),
        ("Lost", f"{count(dropped, 'record')}" if dropped else "nothing"),
    ]
    return [(label, text) for label, text in facts if text]


def _steps(trace: Trace) -> str:
    least = max(trace.processes, key=lambda p: p.left_out, default=None)
    if least is not None and least.left_out > 0:
        return f"{least.steps:,}; {least.left_out:,} of them were left out, the last that was recorded is {trace.steps - 1:,}"
    return f"{trace.steps:,}" + (f"; last step {trace.steps - 1:,}" if trace.steps else "")


def _mesh(trace: Trace) -> str:
    sizes: dict[str, set[int]] = {}
    for p in trace.processes:
        for axis, at in p.coords.items():
            sizes.setdefault(axis, set()).add(at)
    return ", ".join(f"{clean(axis)} × {len(at)}" for axis, at in sizes.items())


def _phases(trace: Trace) -> list[tuple[str, int]]:
    """Records of each phase."""
    counts = (
        trace.calls.group_by("ctx")
        .len()
        .join(trace.contexts.select("ctx", "phase"), on="ctx", how="inner")
        .group_by("phase")
        .agg(pl.col("len").sum())
        .sort("len", "phase", descending=[True, False])
    )
    return [(phase or "unknown", n) for phase, n in counts.iter_rows()]


def _seconds(trace: Trace) -> float:
    spans = trace.calls.group_by("proc").agg(((pl.col("t") + pl.col("dur")).max() - pl.col("t").min()).alias("ns"))
    longest = spans["ns"].max()
    return float(longest) / _NS if isinstance(longest, int) else 0.0


def _functions(trace: Trace) -> list[tuple[str, int, float]]:
    top = (
        trace.calls.group_by("fn")
        .agg(pl.len().alias("n"), pl.col("dur").sum())
        .sort("n", "fn", descending=[True, False])
        .head(TOP)
    )
    return [(clean(trace.functions[fn]) or "(unnamed)", n, dur / _NS) for fn, n, dur in top.iter_rows()]


def _variables(trace: Trace) -> list[tuple[str, str, int, str]]:
    tracked = trace.states.select("var").unique()
    rows = (
        trace.variables.join(tracked, on="var", how="semi")
        .filter(pl.col("name") != "")
        .group_by("module", "role")
        .agg(pl.col("name").n_unique().alias("tensors"), pl.col("attr").unique().sort().alias("attrs"))
        .sort("tensors", "module", "role", descending=[True, False, False])
    )
    return [
        (clean(module) or "(root)", clean(role), tensors, ", ".join(clean(a) for a in attrs))
        for module, role, tensors, attrs in rows.iter_rows()
    ]
