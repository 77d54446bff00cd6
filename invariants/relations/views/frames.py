"""Columnar views of a trace that relations share: rows with their step, values by step, who contains whom.

Every view is computed once for a trace and kept with it, since `propose` and `examples` of a relation need the same.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np
import polars as pl

from proctor.invariants.relations.views.cache import lasting as lasting
from proctor.invariants.relations.views.cache import memo as memo
from proctor.invariants.relations.views.cache import settled as settled
from proctor.invariants.relations.views.containment import contained as contained
from proctor.invariants.relations.views.containment import counted as counted
from proctor.invariants.relations.views.containment import enclosing as enclosing
from proctor.invariants.relations.views.named import UNTOLD as UNTOLD
from proctor.invariants.relations.views.named import call_at as call_at
from proctor.invariants.relations.views.named import calls_of as calls_of
from proctor.invariants.relations.views.named import columns as columns
from proctor.invariants.relations.views.named import contexts_by_code
from proctor.invariants.relations.views.named import function_names as function_names
from proctor.invariants.relations.views.named import functions_like as functions_like
from proctor.invariants.relations.views.named import has_flag as has_flag
from proctor.invariants.relations.views.named import of_context as of_context
from proctor.invariants.schema import CallFlag, Name, StateFlag
from proctor.invariants.trace import Trace
from proctor.invariants.trace.grouping import Array, Groups, last_match, numbers, pairs

T = TypeVar("T")

BACKWARDS: Final = ("torch.Tensor.backward", "torch.autograd.backward")
UPDATE: Final = "torch.optim.Optimizer.step"
_NO_VALUE: Final = int(StateFlag.NONE | StateFlag.UNHASHED)
_POINT_TO_POINT: Final = "torch.distributed.(send|recv|isend|irecv|batch_isend_irecv)"


def has(flag: int) -> pl.Expr:
    return (pl.col("flags") & flag) != 0


def metas(trace: Trace, *names: str) -> pl.DataFrame:
    """Meta codes with these columns, null where nothing set them."""

    def make(trace: Trace) -> pl.DataFrame:
        known = trace.metas
        return known.select("meta", *(pl.col(n) if n in known.columns else pl.lit(None, dtype=pl.String).alias(n) for n in names))

    return lasting(trace, Name.META, ("metas", names), make)


def rows(trace: Trace) -> pl.DataFrame:
    """States that have a value or are known to have none, with step and phase, in the order in which they were seen.

    `fresh` is false for the first row of a variable in a process: an observation, not a change.
    """
    return memo(trace, "rows", _rows)


def _rows(trace: Trace) -> pl.DataFrame:
    unread = has_flag(trace.states, StateFlag.UNHASHED)
    states = trace.states[np.flatnonzero(~unread)] if unread.any() else trace.states
    fp, flags = columns(states, "fp", "flags")
    before = previous_of(states)
    fresh = (before >= 0) & ((fp != fp[before]) | (flags != flags[before]))
    return states.hstack([*of_context(trace, states, "step", "phase"), pl.Series("fresh", fresh)])


def previous_of(states: pl.DataFrame) -> Array:
    """For each row the one before it of the same variable and process; -1 for the first."""
    return Groups(*columns(states, "proc", "var")).previous()


def owned(trace: Trace) -> pl.DataFrame:
    """Variables that belong to a model, without second names of a tensor (`model` is "" for an optimizer's copies)."""
    return lasting(trace, Name.VARIABLE, "owned", lambda t: t.variables.filter((pl.col("model") != "") & (pl.col("alias") == "")))


def _rows_of(trace: Trace, attr: str) -> Array:
    """Numbers of the `rows` of variables of this attribute."""
    mine = lasting(trace, Name.VARIABLE, ("variables", attr), lambda t: (t.variables["attr"] == attr).to_numpy())
    return np.flatnonzero(mine[rows(trace)["var"].to_numpy()])


_REPLICATED: Final = {
    "proc": pl.UInt16, "run": pl.UInt16, "rank": pl.Int32, "world": pl.Int32, "lossy": pl.Boolean, "p2p": pl.Boolean,
}  # fmt: skip


def replicated_runs(trace: Trace) -> pl.DataFrame:
    """Processes of jobs with several ranks, each rank once: proc, run, rank, world, lossy, p2p."""
    return memo(trace, "replicated", _replicated_runs)


def _replicated_runs(trace: Trace) -> pl.DataFrame:
    # One that started the ranks, and trains by itself before or behind them, is rank 0 too, of a world of its own.
    taken = Counter((p.run, p.rank) for p in trace.processes if p.world > 1)
    procs = [proc for proc, p in enumerate(trace.processes) if p.world > 1 and taken[p.run, p.rank] == 1]
    codes = functions_like(trace, [_POINT_TO_POINT])["fn"].to_numpy()
    talkers = trace.calls["proc"].to_numpy()[np.isin(trace.calls["fn"].to_numpy(), codes)] if len(codes) else codes
    talking = {trace.processes[proc].run for proc in np.unique(talkers).tolist() if proc in set(procs)}
    found = [(proc, p.run, p.rank, p.world, p.dropped > 0, p.run in talking) for proc in procs for p in (trace.processes[proc],)]
    return pl.DataFrame(found, schema=_REPLICATED, orient="row")


def marks(row: Mapping[str, Any]) -> set[str]:
    """Attributes that a program has set to something true on a parameter: tensor_model_parallel, is_expert."""
    return {k.removeprefix("attr.") for k, v in row.items() if k.startswith("attr.") and v not in (None, "false", "0", "")}


def layouts(trace: Trace) -> pl.DataFrame:
    """How each process spreads its model, in words: proc, layout.

    Marks on parameters, placements, and whether there are other ranks. A library does other things in another layout,
    and nothing else in a trace says which one its configuration asked for.
    """
    return memo(trace, "layouts", _layouts)


def _layouts(trace: Trace) -> pl.DataFrame:
    said = trace.metas.to_dicts()
    used = dict(trace.states.group_by("proc").agg(pl.col("meta").unique()).iter_rows())
    texts = []
    for proc, process in enumerate(trace.processes):
        words = {word for code in used.get(proc, []) for word in marks(said[code])}
        words |= {f"placement {p}" for code in used.get(proc, []) if (p := said[code].get("placement"))}
        texts.append(", ".join([*sorted(words), "several ranks" if process.world > 1 else "one rank"]))
    return pl.DataFrame({"proc": pl.Series(range(len(texts)), dtype=pl.UInt16), "layout": pl.Series(texts, dtype=pl.String)})


def seen_steps(trace: Trace) -> pl.DataFrame:
    """Steps of which a process has records: proc, step. Others were not sampled, or lost."""
    return memo(trace, "seen", _seen_steps)


def _seen_steps(trace: Trace) -> pl.DataFrame:
    # A part of a run also holds the last state of each variable from before it, of steps that it holds nothing else of.
    part = trace.held is not None and trace.calls.height > 0
    spans = [_of_steps(trace, table) for table in ((trace.calls,) if part else (trace.calls, trace.states))]
    procs, steps = (np.concatenate(column) for column in zip(*spans, strict=True))
    pairs = np.unique(procs << 32 | steps + 1)
    seen = {"proc": pl.Series(pairs >> 32, dtype=pl.UInt16), "step": pl.Series((pairs & 0xFFFFFFFF) - 1, dtype=pl.Int32)}
    return pl.DataFrame(seen)


def _of_steps(trace: Trace, table: pl.DataFrame) -> tuple[Array, Array]:
    """Process and step of rows with a context, in no order and each pair at least once."""
    at = table["ctx"].to_numpy()
    steps = memo(trace, "steps by context", _steps_by_context)
    of = steps[np.minimum(at, len(steps) - 1)]
    known = of > UNTOLD
    return table["proc"].to_numpy()[known].astype(np.int64), of[known]


def _steps_by_context(trace: Trace) -> Array:
    told, at = memo(trace, "contexts by code step", lambda t: contexts_by_code(t, ["step"]))
    steps: Array = numbers(told["step"], UNTOLD)[at].astype(np.int64)
    return steps


def whole_steps(trace: Trace) -> pl.DataFrame:
    """Steps after which a process has records of a later one, or is known to have ended: proc, step.

    Writes that no boundary follows (a copy of masters after the last update) are seen at the next step's beginning
    only, so the last step of a process is never whole. Tables of a process that was killed end at different steps:
    what lies behind the end of either is not whole.
    """
    return memo(trace, "whole", _whole_steps)


def _whole_steps(trace: Trace) -> pl.DataFrame:
    seen = seen_steps(trace)
    return seen.filter(pl.Series(_before_end(trace, seen["proc"].to_numpy(), seen["step"].to_numpy())))


def is_whole(trace: Trace, procs: np.ndarray[Any, Any], steps: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Which of these are `whole_steps`."""
    seen = seen_steps(trace)
    pairs = seen["proc"].to_numpy().astype(np.int64) << 32 | seen["step"].to_numpy() + 1  # sorted
    wanted = procs.astype(np.int64) << 32 | steps + 1
    at = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    found: np.ndarray[Any, Any] = (pairs[at] == wanted) & _before_end(trace, procs, steps) if len(pairs) else np.zeros(len(wanted), dtype=bool)
    return found


def _before_end(trace: Trace, procs: np.ndarray[Any, Any], steps: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Whether these steps are over in their processes."""
    ends = memo(trace, "ends", _ends)
    over: np.ndarray[Any, Any] = (steps < ends[procs]) | (steps <= trace.over)
    return over


def _ends(trace: Trace) -> np.ndarray[Any, Any]:
    """The last step of each process that both tables have rows of; of one that ended, that any has."""
    ends = []
    for table in (trace.calls, trace.states):
        procs, steps = _of_steps(trace, table)
        last = np.full(len(trace.processes), UNTOLD, dtype=np.int64)
        np.maximum.at(last, procs, steps)
        ends.append(last)
    told = [np.where(last > UNTOLD, last, other) for last, other in (ends, ends[::-1])]  # a table without rows says nothing
    finished = np.array([p.finished for p in trace.processes], dtype=bool)
    return np.where(finished, np.maximum(*told), np.minimum(*told))


def updates(trace: Trace) -> pl.DataFrame:
    """Outermost optimizer updates that no exception ended: proc, seq, step, phase, site, optimizer ("#0"), kind (class)."""
    return memo(trace, "updates", _updates)


def _updates(trace: Trace) -> pl.DataFrame:
    codes = functions_like(trace, [re.escape(UPDATE)])["fn"].to_numpy()
    found = trace.calls[np.flatnonzero(np.isin(trace.calls["fn"].to_numpy(), codes))]
    proc, seq, begin, dur = columns(found, "proc", "seq", "t", "dur")
    order = np.argsort(pairs(proc, seq), kind="stable")
    # Inside another, at any depth: a wrapper's step calls the step of what it wraps.
    found = found[order[begin[order] >= _latest_before(proc[order], (begin + dur)[order])]].filter(~has(int(CallFlag.RAISED)))
    said = [_text_column(trace, found["args"].to_numpy(), path, name) for name, path in (("optimizer", "0.name"), ("kind", "0.type"))]
    return found.hstack([*of_context(trace, found, "step", "phase"), *said])


def _latest_before(group: Array, values: Array) -> Array:
    """For each row the greatest of the earlier values of its group, -1 for none; rows of a group lie together."""
    size = len(values)
    by_value = np.argsort(values, kind="stable")
    rank = np.empty(size, dtype=np.int64)
    rank[by_value] = np.arange(size)
    begins = np.diff(group.astype(np.int64), prepend=-1) != 0
    number = np.cumsum(begins)
    highest = np.maximum.accumulate(number * size + rank) - number * size
    found = np.full(size, -1, dtype=np.int64)
    found[1:] = np.where(begins[1:], -1, values[by_value[highest[:-1]]]) if size else found[1:]
    return found


def _text_column(trace: Trace, codes: Array, path: str, name: str) -> pl.Series:
    """Text of a feature of these signatures, null where they have none."""
    which, of = np.unique(codes, return_inverse=True)
    return pl.Series(name, [_text(trace.features[c].get(path)) for c in which.tolist()], dtype=pl.String)[of]


def arguments(trace: Trace, codes: pl.Series, **columns: str) -> pl.DataFrame:
    """Texts of features of these signatures: args, and a column for each keyword."""
    wanted = codes.unique()
    return pl.DataFrame([wanted.alias("args"), *(_text_column(trace, wanted.to_numpy(), path, name) for name, path in columns.items())])


def _text(value: Any) -> str | None:
    if value is None:
        return None
    return ("true" if value else "false") if isinstance(value, bool) else str(value)


def first_values(trace: Trace) -> pl.DataFrame:
    """What each parameter and buffer held before the first update of its process: proc, var, fp, flags, meta."""
    return memo(trace, "first_values", _first_values)


def _first_values(trace: Trace) -> pl.DataFrame:
    mine = _rows_of(trace, "data")
    proc, var, seq, call, edge = (column[mine] for column in columns(rows(trace), "proc", "var", "seq", "call", "edge"))
    first = np.full(len(trace.processes), np.iinfo(np.int64).max)
    np.minimum.at(first, *columns(updates(trace), "proc", "seq"))
    before = (seq < first[proc]) | ((call == first[proc]) & (edge == 0))
    # A variable that appears later has its first row.
    before[Groups(proc, var).first] = True
    last: Array = np.flatnonzero(before)[Groups(proc[before], var[before]).last]
    return rows(trace)[["proc", "var", "fp", "flags", "meta"]][mine[last]]


def data_by_step(trace: Trace) -> pl.DataFrame:
    """Last value of each step in which a parameter or buffer has a row: proc, var, step, fp, flags, meta, norm, changed."""
    return memo(trace, "data_by_step", _data_by_step)


def _data_by_step(trace: Trace) -> pl.DataFrame:
    mine, found = _rows_of(trace, "data"), rows(trace)
    groups = Groups(*(column[mine] for column in columns(found, "proc", "var", "step")))
    changed = pl.Series("changed", groups.any(found["fresh"].to_numpy()[mine]))
    return found[["proc", "var", "step", "fp", "flags", "meta", "norm", "seq", "call"]][mine[groups.last]].hstack([changed])


def used_gradients(trace: Trace) -> pl.DataFrame:
    """The gradient that an update used, if it changed in the update's step.

    Columns: proc, var (of the gradient), step, fp, flags, meta, norm, changed, update (seq), site. A parameter in an
    optimizer belongs to the last update of that optimizer in the step, one in none to the last update of any.
    """
    return memo(trace, "used_gradients", _used_gradients)


def inner_backwards(trace: Trace) -> pl.DataFrame:
    """Backwards that run inside of an update, in its closure: proc, update (its seq), call."""
    return memo(trace, "inner_backwards", lambda t: _within_updates(t, [r"torch\.Tensor\.backward", r"torch\.autograd\.backward"]))


def inner_clippings(trace: Trace) -> pl.DataFrame:
    """Clippings that an optimizer of the program does within its update: proc, update (its seq), call."""
    return memo(trace, "inner_clippings", lambda t: _within_updates(t, [r"torch\.nn\.utils\.clip_grad_norm_"]))


def _within_updates(trace: Trace, names: Sequence[str]) -> pl.DataFrame:
    outer, at = updates(trace), np.flatnonzero(np.isin(trace.calls["fn"].to_numpy(), functions_like(trace, names)["fn"].to_numpy()))
    proc, seq = (trace.calls[c].to_numpy()[at] for c in ("proc", "seq"))
    begun, until = outer["proc"].to_numpy().astype(np.int64) << 32 | outer["seq"].to_numpy(), (outer["t"] + outer["dur"]).to_numpy()
    last = np.searchsorted(begun, proc.astype(np.int64) << 32 | seq, "right") - 1
    inner = (last >= 0) & (outer["proc"].to_numpy()[last] == proc) & (trace.calls["t"].to_numpy()[at] < until[last]) if len(begun) else last >= 0
    return pl.DataFrame({"proc": proc[inner], "update": outer["seq"].to_numpy()[last[inner]], "call": seq[inner]}, schema={"proc": pl.UInt16, "update": pl.UInt32, "call": pl.UInt32})


def _used_gradients(trace: Trace) -> pl.DataFrame:
    found, steps = rows(trace), updates(trace)
    mine = _rows_of(trace, "grad")
    codes, owners = lasting(trace, Name.META, "optimizers", _optimizers)
    none = has_flag(found, StateFlag.NONE)
    # What is taken away before the update is not used; of a parameter that no optimizer holds it is copied to one that is.
    mine = mine[~none[mine] | (owners[columns(found, "meta")[0][mine]] != _FREE)]
    proc, var, step, call, seq, edge, meta = (
        column[mine] for column in columns(found, "proc", "var", "step", "call", "seq", "edge", "meta")
    )
    own = owners[meta]
    of, when, begin, site = columns(steps, "proc", "step", "seq", "site")
    whose = np.array([codes.get(name, _UNHELD) for name in steps["optimizer"].to_list()], dtype=np.uint32)
    at = np.where(own == _FREE, last_match((proc, step), (of, when)), last_match((proc, step, own), (of, when, whose)))
    at[step == UNTOLD] = -1
    update, line = np.append(begin, 0)[at], np.append(site, 0)[at]  # 0, before all calls, without an update
    before = (seq < update) | ((call == update) & (edge == 0) & (at >= 0))
    closure = inner_backwards(trace)
    if closure.height:
        before |= last_match((proc, call), (closure["proc"].to_numpy(), closure["call"].to_numpy())) >= 0
    last: Array = np.flatnonzero(before)[Groups(proc[before], var[before], step[before]).last]
    last = last[~none[mine[last]]]
    blank = np.flatnonzero(at[last] < 0)
    told = [pl.Series(name, column[last], dtype=pl.UInt32).scatter(blank, None) for name, column in (("update", update), ("site", line))]
    changed = pl.Series("changed", np.ones(len(last), dtype=bool))
    used: pl.DataFrame = found[["proc", "var", "step", "fp", "flags", "meta", "norm", "seq"]][mine[last]]
    return used.hstack([*told, changed])


_FREE: Final = (1 << 32) - 1  # of a gradient whose parameter is in no optimizer
_UNHELD: Final = _FREE - 1  # of an optimizer without a parameter


def _optimizers(trace: Trace) -> tuple[dict[str | None, int], Array]:
    """A number for each optimizer that holds parameters, and that of each meta code."""
    names = metas(trace, "optimizer")["optimizer"].to_list()
    codes: dict[str | None, int] = {name: i for i, name in enumerate(sorted({n for n in names if n is not None}))}
    return codes, np.array([_FREE if n is None else codes[n] for n in names], dtype=np.uint32)


def news(trace: Trace) -> pl.Expr:
    """Whether a row is of the steps that are judged now: what earlier ones look like must not crowd these out."""
    return (pl.col("step") >= trace.since).fill_null(value=False)


def first_of_each(frame: pl.DataFrame, by: Sequence[str | pl.Expr], count: int) -> pl.DataFrame:
    """The first rows of each group: the rest of a loop of a thousand equal steps says nothing more."""
    return frame.filter(pl.int_range(pl.len()).over(by) < count)
