"""Columnar views of a trace that relations share: rows with their step, values by step, who contains whom.

Every view is computed once for a trace and kept with it, since `propose` and `examples` of a relation need the same.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np
import polars as pl

from proctor.invariants.schema import Name, StateFlag
from proctor.invariants.trace import Trace

T = TypeVar("T")

UPDATE: Final = "torch.optim.Optimizer.step"
_UNTOLD: Final = -(1 << 31)  # step of a context that is not known
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


def lasting(trace: Trace, kind: Name, key: Hashable, make: Callable[[Trace], T]) -> T:
    """A view of a trace's texts of one kind. Windows of a run that goes on share it for as long as no such text is new."""
    kept: dict[Any, tuple[int, Any]] = trace.__dict__.setdefault("lasting", {})
    size = len(trace.texts.get(kind, ()))
    found = kept.get(key)
    if found is None or found[0] != size:
        found = kept[key] = size, make(trace)
    view: T = found[1]
    return view


def settled(trace: Trace, key: str, inputs: Sequence[pl.DataFrame], make: Callable[[], T]) -> T:
    """What follows from these frames and the trace's texts; windows share it where these are the same row by row."""
    digest = hashlib.blake2b(len(trace.texts[Name.META]).to_bytes(8, "little"), digest_size=16)
    for frame in inputs:
        digest.update(frame.height.to_bytes(8, "little") + frame.hash_rows().to_numpy().tobytes())
    said = digest.digest()
    held: dict[str, Any] = lasting(trace, Name.VARIABLE, ("settled", key), lambda _: {})
    if held.get("of") != said:
        held["of"], held["view"] = said, make()
    view: T = held["view"]
    return view


def has(flag: int) -> pl.Expr:
    return (pl.col("flags") & flag) != 0


def metas(trace: Trace, *names: str) -> pl.DataFrame:
    """Meta codes with these columns, null where nothing set them."""

    def make(trace: Trace) -> pl.DataFrame:
        known = trace.metas
        return known.select("meta", *(pl.col(n) if n in known.columns else pl.lit(None, dtype=pl.String).alias(n) for n in names))

    return lasting(trace, Name.META, ("metas", names), make)


def functions_like(trace: Trace, names: Sequence[str]) -> pl.DataFrame:
    """Codes of functions that match one of these regular expressions (whole name): fn."""

    def make(trace: Trace) -> pl.DataFrame:
        pattern = re.compile("|".join(f"(?:{n})" for n in names))
        codes = [code for code, text in enumerate(trace.functions) if pattern.fullmatch(text)]
        return pl.DataFrame({"fn": pl.Series(codes, dtype=pl.UInt32)})

    return lasting(trace, Name.FUNCTION, ("functions", *names), make)


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
    return lasting(trace, Name.VARIABLE, "owned", lambda t: t.variables.filter((pl.col("model") != "") & (pl.col("alias") == "")))


def variables_with(trace: Trace, attr: str) -> pl.DataFrame:
    """Variables of this attribute: var."""
    return lasting(trace, Name.VARIABLE, ("variables", attr), lambda t: t.variables.filter(pl.col("attr") == attr).select("var"))


_REPLICATED: Final = {
    "proc": pl.UInt16, "run": pl.UInt16, "rank": pl.Int32, "world": pl.Int32, "lossy": pl.Boolean, "p2p": pl.Boolean,
}  # fmt: skip


def replicated_runs(trace: Trace) -> pl.DataFrame:
    """Processes of jobs with several ranks, each rank once: proc, run, rank, world, lossy, p2p."""
    return memo(trace, "replicated", _replicated_runs)


def _replicated_runs(trace: Trace) -> pl.DataFrame:
    taken = Counter((p.run, p.rank) for p in trace.processes)
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
    spans = [_of_steps(trace, table) for table in (trace.calls, trace.states)]
    procs, steps = (np.concatenate(column) for column in zip(*spans, strict=True))
    pairs = np.unique(procs << 32 | steps + 1)
    seen = {"proc": pl.Series(pairs >> 32, dtype=pl.UInt16), "step": pl.Series((pairs & 0xFFFFFFFF) - 1, dtype=pl.Int32)}
    return pl.DataFrame(seen)


def _of_steps(trace: Trace, table: pl.DataFrame) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Process and step of rows with a context, in no order and each pair at least once."""
    procs, ctx = table["proc"].to_numpy().astype(np.int64), table["ctx"].to_numpy()
    steps = memo(trace, "steps by context", _steps_by_context)
    of = steps[np.minimum(ctx, len(steps) - 1)]
    known = (ctx < len(steps)) & (of > _UNTOLD)
    return procs[known], of[known]


def _steps_by_context(trace: Trace) -> np.ndarray[Any, Any]:
    codes = trace.contexts["ctx"].to_numpy()
    steps = np.full(int(codes.max(initial=0)) + 1, _UNTOLD, dtype=np.int64)
    steps[codes] = trace.contexts["step"].fill_null(_UNTOLD).to_numpy()
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
        last = np.full(len(trace.processes), _UNTOLD, dtype=np.int64)
        np.maximum.at(last, procs, steps)
        ends.append(last)
    told = [np.where(last > _UNTOLD, last, other) for last, other in (ends, ends[::-1])]  # a table without rows says nothing
    finished = np.array([p.finished for p in trace.processes], dtype=bool)
    return np.where(finished, np.maximum(*told), np.minimum(*told))


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
    data = rows(trace).join(variables_with(trace, "data"), on="var", how="semi")
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
    data = rows(trace).join(variables_with(trace, "data"), on="var", how="semi")
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
    codes = functions_like(trace, [r"torch\.Tensor\.backward", r"torch\.autograd\.backward"])["fn"].to_numpy()
    outer, at = updates(trace).sort("proc", "seq"), np.flatnonzero(np.isin(trace.calls["fn"].to_numpy(), codes))
    proc, seq = (trace.calls[c].to_numpy()[at] for c in ("proc", "seq"))
    begun = outer["proc"].to_numpy().astype(np.int64) << 32 | outer["seq"].to_numpy()
    last = np.searchsorted(begun, proc.astype(np.int64) << 32 | seq, "right") - 1
    until = (outer["t"] + outer["dur"]).to_numpy()
    inner = (last >= 0) & (outer["proc"].to_numpy()[last] == proc) & (trace.calls["t"].to_numpy()[at] < until[last]) if len(begun) else last >= 0
    found = {"proc": proc[inner], "update": outer["seq"].to_numpy()[last[inner]], "call": seq[inner]}
    return pl.DataFrame(found, schema={"proc": pl.UInt16, "update": pl.UInt32, "call": pl.UInt32})


def _used_gradients(trace: Trace) -> pl.DataFrame:
    grads = rows(trace).join(variables_with(trace, "grad"), on="var", how="semi")
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
