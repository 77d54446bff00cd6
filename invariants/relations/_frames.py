"""Columnar views of a trace that relations share: rows with their step, values by step, who contains whom.

Every view is computed once for a trace and kept with it, since `propose` and `examples` of a relation need the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np
import polars as pl

from proctor.invariants.schema import StateFlag
from proctor.invariants.trace import Trace

T = TypeVar("T")

UPDATE: Final = "torch.optim.Optimizer.step"
_NO_VALUE: Final = int(StateFlag.NONE | StateFlag.UNHASHED)
_MAX_DEPTH: Final = 12  # enclosing calls looked at
_POINT_TO_POINT: Final = "torch.distributed.(send|recv|isend|irecv|batch_isend_irecv)"


def memo(trace: Trace, key: str, make: Callable[[Trace], T]) -> T:
    """A view of this trace, made at its first use."""
    kept: dict[str, Any] = trace.__dict__.setdefault("_views", {})
    if key not in kept:
        kept[key] = make(trace)
    view: T = kept[key]
    return view


def has(flag: int) -> pl.Expr:
    return (pl.col("flags") & flag) != 0


def metas(trace: Trace, *names: str) -> pl.DataFrame:
    """Meta codes with these columns, null where nothing set them."""
    known = trace.metas
    return known.select("meta", *(pl.col(n) if n in known.columns else pl.lit(None, dtype=pl.String).alias(n) for n in names))


def functions_like(trace: Trace, names: Sequence[str]) -> pl.DataFrame:
    """Codes of functions that match one of these regular expressions (whole name): fn."""
    pattern = re.compile("|".join(f"(?:{n})" for n in names))
    codes = [code for code, text in enumerate(trace.functions) if pattern.fullmatch(text)]
    return pl.DataFrame({"fn": pl.Series(codes, dtype=pl.UInt32)})


def calls_of(trace: Trace, *names: str) -> pl.DataFrame:
    """Calls of functions whose names match these regular expressions, with step and phase."""
    wanted = functions_like(trace, names)["fn"]
    found = trace.calls.filter(pl.col("fn").is_in(wanted.implode()))
    return found.join(trace.contexts.select("ctx", "step", "phase"), on="ctx", how="left", maintain_order="left")


def rows(trace: Trace) -> pl.DataFrame:
    """States that have a value or are known to have none, with step and phase, in the order in which they were seen.

    `fresh` is false for the first row of a variable in a process: an observation, not a change.
    """
    return memo(trace, "rows", _rows)


def _rows(trace: Trace) -> pl.DataFrame:
    states = trace.states.filter(~has(int(StateFlag.UNHASHED)))
    states = states.join(trace.contexts.select("ctx", "step", "phase"), on="ctx", how="left", maintain_order="left")
    keys = ["fp", "flags"]
    return states.with_columns(
        pl.any_horizontal(pl.col(k) != pl.col(k).shift(1) for k in keys)
        .over("proc", "var")
        .fill_null(value=False)
        .alias("fresh")
    )


def owned(trace: Trace) -> pl.DataFrame:
    """Variables that belong to a model, without second names of a tensor (`model` is "" for an optimizer's copies)."""
    return trace.variables.filter((pl.col("model") != "") & (pl.col("alias") == ""))


def replicated_runs(trace: Trace) -> pl.DataFrame:
    """Processes of jobs with several ranks, each rank once: proc, run, rank, world, lossy, p2p."""
    return memo(trace, "replicated", _replicated_runs)


def _replicated_runs(trace: Trace) -> pl.DataFrame:
    lossy = pl.Series("lossy", [p.dropped > 0 for p in trace.processes], dtype=pl.Boolean)
    procs = trace.procs.drop("program").with_columns(lossy).filter(pl.col("world") > 1)
    procs = procs.filter(pl.len().over("run", "rank") == 1)
    codes = functions_like(trace, [_POINT_TO_POINT])["fn"]
    talkers = trace.calls.filter(pl.col("fn").is_in(codes.implode()))["proc"].unique()
    return procs.with_columns(pl.col("proc").is_in(talkers.implode()).any().over("run").alias("p2p"))


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
    used = pl.concat([trace.calls.select("proc", "ctx").unique(), trace.states.select("proc", "ctx").unique()]).unique()
    return used.join(trace.contexts.select("ctx", "step"), on="ctx").select("proc", "step").unique()


def whole_steps(trace: Trace) -> pl.DataFrame:
    """Steps after which a process has records of a later one, or is known to have ended: proc, step.

    Writes that no boundary follows (a copy of masters after the last update) are seen at the next step's beginning
    only, so the last step of a process is never whole. Tables of a process that was killed end at different steps:
    what lies behind the end of either is not whole.
    """
    return memo(trace, "whole", _whole_steps)


def _whole_steps(trace: Trace) -> pl.DataFrame:
    ends = []
    for table in (trace.calls, trace.states):
        steps = table.select("proc", "ctx").unique().join(trace.contexts.select("ctx", "step"), on="ctx")
        ends.append(steps.group_by("proc").agg(pl.col("step").max()))
    finished = pl.DataFrame({"proc": trace.procs["proc"], "_finished": pl.Series([p.finished for p in trace.processes], dtype=pl.Boolean)})
    end = pl.concat(ends).group_by("proc").agg(pl.col("step").max().alias("_last"), pl.col("step").min().alias("_least"))
    end = end.join(finished, on="proc").select("proc", pl.when("_finished").then("_last").otherwise("_least").alias("_end"))
    seen = seen_steps(trace).join(end, on="proc", maintain_order="left")
    return seen.filter((pl.col("step") < pl.col("_end")) | (pl.col("step") <= trace.over)).drop("_end")


def updates(trace: Trace) -> pl.DataFrame:
    """Outermost optimizer updates: proc, seq, step, phase, site, optimizer ("#0"), kind (class)."""
    return memo(trace, "updates", _updates)


def _updates(trace: Trace) -> pl.DataFrame:
    found = calls_of(trace, re.escape(UPDATE)).sort("proc", "seq")
    # Inside another, at any depth: a wrapper's step calls the step of what it wraps.
    until = (pl.col("t") + pl.col("dur")).cum_max().shift(1).over("proc").fill_null(-1)
    found = found.filter(pl.col("t") >= until)
    return found.join(arguments(trace, found["args"], optimizer="0.name", kind="0.type"), on="args", how="left", maintain_order="left")


def arguments(trace: Trace, codes: pl.Series, **columns: str) -> pl.DataFrame:
    """Texts of features of these signatures: args, and a column for each keyword."""
    wanted = codes.unique().to_list()
    return pl.DataFrame(
        {
            "args": pl.Series(wanted, dtype=pl.UInt32),
            **{
                name: pl.Series([_text(trace.features[c].get(path)) for c in wanted], dtype=pl.String)
                for name, path in columns.items()
            },
        }
    )


def _text(value: Any) -> str | None:
    if value is None:
        return None
    return ("true" if value else "false") if isinstance(value, bool) else str(value)


def first_values(trace: Trace) -> pl.DataFrame:
    """What each parameter and buffer held before the first update of its process: proc, var, fp, flags, meta."""
    return memo(trace, "first_values", _first_values)


def _first_values(trace: Trace) -> pl.DataFrame:
    data = rows(trace).join(trace.variables.filter(pl.col("attr") == "data").select("var"), on="var", how="semi")
    first = updates(trace).group_by("proc").agg(pl.col("seq").min().alias("_update"))
    data = data.join(first, on="proc", how="left", maintain_order="left")
    before = (pl.col("seq") < pl.col("_update")) | ((pl.col("call") == pl.col("_update")) & (pl.col("edge") == 0))
    data = data.with_columns(before.fill_null(value=True).alias("_before"))
    # A variable that appears later has its first row.
    data = data.filter(pl.col("_before") | (pl.int_range(pl.len()).over("proc", "var") == 0))
    return data.group_by("proc", "var", maintain_order=True).agg(pl.col("fp", "flags", "meta").last())


def data_by_step(trace: Trace) -> pl.DataFrame:
    """Last value of each step in which a parameter or buffer has a row: proc, var, step, fp, flags, meta, norm, changed."""
    return memo(trace, "data_by_step", _data_by_step)


def _data_by_step(trace: Trace) -> pl.DataFrame:
    data = rows(trace).join(trace.variables.filter(pl.col("attr") == "data").select("var"), on="var", how="semi")
    return data.group_by("proc", "var", "step", maintain_order=True).agg(
        pl.col("fp", "flags", "meta", "norm", "seq", "call").last(), pl.col("fresh").any().alias("changed")
    )


def used_gradients(trace: Trace) -> pl.DataFrame:
    """The gradient that an update used, if it changed in the update's step.

    Columns: proc, var (of the gradient), step, fp, flags, meta, norm, changed, update (seq), site. A parameter in an
    optimizer belongs to the last update of that optimizer in the step, one in none to the last update of any.
    """
    return memo(trace, "used_gradients", _used_gradients)


def inner_backwards(trace: Trace) -> pl.DataFrame:
    """Backwards that run inside of an update, in its closure: proc, update (its seq), call."""
    return memo(trace, "inner_backwards", _inner_backwards)


def _inner_backwards(trace: Trace) -> pl.DataFrame:
    outer = updates(trace).select("proc", pl.col("seq").alias("update"), pl.col("t") + pl.col("dur")).sort("update")
    outer = outer.rename({"t": "_until"})
    inner = calls_of(trace, r"torch\.Tensor\.backward", r"torch\.autograd\.backward").select("proc", "seq", "t").sort("seq")
    inner = inner.join_asof(outer, left_on="seq", right_on="update", by="proc", coalesce=False, check_sortedness=False)
    return inner.filter(pl.col("t") < pl.col("_until")).select("proc", "update", pl.col("seq").alias("call"))


def _used_gradients(trace: Trace) -> pl.DataFrame:
    grads = rows(trace).join(trace.variables.filter(pl.col("attr") == "grad").select("var"), on="var", how="semi")
    grads = grads.filter(~has(int(StateFlag.NONE))).join(metas(trace, "optimizer"), on="meta", how="left", maintain_order="left")
    steps = updates(trace).select("proc", "step", "optimizer", "seq", "site")
    own = steps.group_by("proc", "step", "optimizer").agg(pl.col("seq", "site").last())
    last = steps.group_by("proc", "step").agg(pl.col("seq", "site").last())
    grads = grads.join(
        own.rename({"seq": "_own", "site": "_own_site"}), on=["proc", "step", "optimizer"], how="left", maintain_order="left"
    ).join(last.rename({"seq": "_any", "site": "_any_site"}), on=["proc", "step"], how="left", maintain_order="left")
    free = pl.col("optimizer").is_null()
    grads = grads.with_columns(
        pl.when(free).then("_any").otherwise("_own").alias("update"),
        pl.when(free).then("_any_site").otherwise("_own_site").alias("site"),
    )
    before = (pl.col("seq") < pl.col("update")) | ((pl.col("call") == pl.col("update")) & (pl.col("edge") == 0))
    closure = inner_backwards(trace).drop("update").with_columns(pl.lit(value=True).alias("_closure"))
    grads = grads.join(closure, on=["proc", "call"], how="left", maintain_order="left")
    return (
        grads.filter(before | pl.col("_closure").fill_null(value=False))
        .group_by("proc", "var", "step", maintain_order=True)
        .agg(pl.col("fp", "flags", "meta", "norm", "update", "site", "seq").last(), pl.lit(value=True).alias("changed"))
    )


def enclosing(trace: Trace) -> np.ndarray[Any, Any]:
    """Row of the enclosing call of each row of `trace.calls`; -1 without one."""
    return memo(trace, "enclosing", _enclosing)


def _enclosing(trace: Trace) -> np.ndarray[Any, Any]:
    proc = trace.calls["proc"].to_numpy().astype(np.uint64) << np.uint64(32)
    key = proc | trace.calls["seq"].to_numpy().astype(np.uint64)
    parent = trace.calls["parent"].to_numpy()
    wanted = proc | parent.astype(np.uint64)
    order = np.argsort(key, kind="stable")
    at = np.searchsorted(key[order], wanted)
    at[at >= len(key)] = 0
    where = order[at] if len(key) else at
    found = (parent != 0) & (key[where] == wanted) if len(key) else np.zeros(0, dtype=bool)
    return np.where(found, where, -1)


def contained(trace: Trace, parents: np.ndarray[Any, Any], children: np.ndarray[Any, Any]) -> pl.DataFrame:
    """Which functions each call contains at any depth: row (of the enclosing call), child (function code).

    Args:
        parents: by function code, true where its calls are of interest.
        children: likewise for what they contain.
    """
    up = enclosing(trace)
    fn = trace.calls["fn"].to_numpy()
    n_fn = np.uint64(max(len(trace.functions), 1))
    inner = np.flatnonzero(children[fn] & (up >= 0))
    at, child = up[inner], fn[inner].astype(np.uint64)
    found: list[np.ndarray[Any, Any]] = []
    for _ in range(_MAX_DEPTH):
        # A loop's body calls the same function over and over: one pair each, so that every level is smaller.
        pair = pl.Series(at.astype(np.uint64) * n_fn + child).unique().to_numpy()
        at, child = (pair // n_fn).astype(np.int64), pair % n_fn
        found.append(pair[parents[fn[at]]])
        at = up[at]
        at, child = at[at >= 0], child[at >= 0]
        if not len(at):
            break
    pairs = pl.Series("pair", np.concatenate(found) if found else np.zeros(0, dtype=np.uint64)).unique()
    return pl.DataFrame(
        {"row": (pairs // int(n_fn)).cast(pl.UInt32), "child": (pairs % int(n_fn)).cast(pl.UInt32)}
    )


def news(trace: Trace) -> pl.Expr:
    """Whether a row is of the steps that are judged now: what earlier ones look like must not crowd these out."""
    return (pl.col("step") >= trace.since).fill_null(value=False)


def first_of_each(frame: pl.DataFrame, by: Sequence[str | pl.Expr], count: int) -> pl.DataFrame:
    """The first rows of each group: the rest of a loop of a thousand equal steps says nothing more."""
    return frame.filter(pl.int_range(pl.len()).over(by) < count)
