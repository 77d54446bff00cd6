"""Calls as relations use them: steps and parents resolved, distinct calls with counts, features as columns.

Training repeats itself, so a million calls are a few thousand distinct ones. Each table below is built once for a
trace, with one pass over the calls, and shared by the relations (kept on the trace object).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import polars as pl

from proctor.invariants.codec.signature import Plain
from proctor.invariants.invariant import Hypothesis
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.schema import MODEL_CALL, CallFlag, Name
from proctor.invariants.trace import Trace

T = TypeVar("T")

CIRCUMSTANCES = ("phase", "grad", "autocast", "outer", "recompute")
ENOUGH = 3  # examples of one kind; more add nothing
_MAX_DEPTH = 16  # of torch's functions in torch's functions
_MAX_FIELDS = 40  # features of arguments that become fields; those of most functions
FLOATING = r"^(float|bfloat|half|double|complex)"
_NOT_A_FIELD = (
    r"\.(shape\[\d+\]|len|device|requires_grad|path)$|\]\.(dtype|value|name|training)$|^([4-9]|\d\d)\.|\._"
)


def cached(trace: Trace, key: str, build: Callable[[], T]) -> T:
    """What was built for this trace under this key; a trace never changes once it is read."""
    return _frames.memo(trace, f"calls {key}", lambda _: build())


# -- whose function ---------------------------------------------------------------------------------------------


def is_torch(name: str) -> bool:
    return name.startswith("torch.")


def is_script(name: str) -> bool:
    """A function of the script itself; its name (main, train, …) is shared by unrelated programs."""
    return name.startswith("__main__.")


def is_library(name: str) -> bool:
    """A function of a library that the user imports; its name says which program parts it belongs to."""
    return bool(name) and not is_torch(name) and not is_script(name) and name != MODEL_CALL


def codes_where(trace: Trace, accept: Callable[[str], bool]) -> list[int]:
    """Codes of functions whose name is accepted."""
    return [code for code, name in enumerate(trace.functions) if name and accept(name)]


# -- calls ------------------------------------------------------------------------------------------------------


def calls_of(trace: Trace) -> pl.DataFrame:
    """All calls that returned: proc, seq, fn, args, ret, site, step, micro, circ, pfn, root.

    pfn is the nearest enclosing function that is not torch's own (0: none), circ a row of `circumstances_of`.
    """
    return cached(trace, "calls", lambda: _build_calls(trace))


def circumstances_of(trace: Trace) -> pl.DataFrame:
    """One row a distinct circumstance: circ, phase, grad, autocast, outer, recompute; all text."""
    return cached(trace, "circumstances", lambda: _contexts(trace)[1])


def distinct_of(trace: Trace) -> pl.DataFrame:
    """Distinct calls: proc, fn, args, ret, pfn, circ, with `calls` and the seq, step and site of the first."""
    return cached(
        trace,
        "distinct",
        lambda: (
            calls_of(trace)
            .group_by("proc", "fn", "args", "ret", "pfn", "circ", "root", _frames.news(trace).alias("new"))
            .agg(pl.len().alias("calls"), pl.col("seq", "step", "site").sort_by("seq").first())
            .drop("new")
            .sort("proc", "seq")
        ),
    )


def _contexts(trace: Trace) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Contexts with the code of their circumstance, and the circumstances."""

    def build() -> tuple[pl.DataFrame, pl.DataFrame]:
        named = trace.contexts.select(
            "ctx",
            "step",
            "micro",
            *(
                pl.when(pl.col(c)).then(pl.lit("true")).otherwise(pl.lit("false")).alias(c)
                if trace.contexts.schema[c] == pl.Boolean
                else pl.col(c).cast(pl.String)
                for c in CIRCUMSTANCES
            ),
        )
        kinds = named.select(CIRCUMSTANCES).unique().sort(CIRCUMSTANCES).with_row_index("circ", offset=1)
        return named.join(kinds, on=CIRCUMSTANCES, nulls_equal=True).drop(CIRCUMSTANCES), kinds

    return cached(trace, "contexts", build)


def _build_calls(trace: Trace) -> pl.DataFrame:
    calls, contexts = trace.calls, _contexts(trace)[0]
    seq = calls["seq"].to_numpy().astype(np.int64)
    proc = calls["proc"].to_numpy().astype(np.int64)
    parent = calls["parent"].to_numpy().astype(np.int64)
    fn = calls["fn"].to_numpy()
    # Sequence numbers are dense in a process, so a table by (process, seq) finds parents without a join.
    size = np.zeros(len(trace.processes) + 1, dtype=np.int64)
    if len(seq):
        np.maximum.at(size, proc + 1, np.maximum(seq, parent) + 1)
    start = np.cumsum(size)
    fn_at = np.zeros(int(start[-1]) + 1, dtype=np.uint32)
    fn_at[start[proc] + seq] = fn
    up_at = np.repeat(start[:-1], np.diff(start))
    up_at = np.append(up_at, start[-1])
    up_at[start[proc] + seq] = start[proc] + parent
    fn_at[start[:-1]] = 0
    torch = np.array([is_torch(name) for name in trace.functions])
    at = start[proc] + parent
    for _ in range(_MAX_DEPTH):
        inside = torch[fn_at[at]]
        if not inside.any():
            break
        at = np.where(inside, up_at[at], at)
    ctx = calls["ctx"].to_numpy()
    known = contexts["ctx"].to_numpy()

    def by_context(column: str, missing: int) -> np.ndarray[Any, Any]:
        table = np.full(int(max(known.max(initial=0), ctx.max(initial=0))) + 1, missing, dtype=np.int32)
        table[known] = contexts[column].to_numpy()
        taken: np.ndarray[Any, Any] = table[ctx]
        return taken

    flags = pl.col("flags")
    return (
        calls.select(
            "proc",
            "seq",
            "fn",
            "args",
            "ret",
            "site",
            pl.Series("step", by_context("step", -1)),
            pl.Series("micro", by_context("micro", 0)),
            pl.Series("circ", by_context("circ", 0), dtype=pl.Int32).cast(pl.UInt32),
            pl.Series("pfn", fn_at[at]),
            (flags & int(CallFlag.ROOT) != 0).alias("root"),
            (flags & int(CallFlag.RAISED) != 0).alias("_raised"),
        )
        .filter(~pl.col("_raised"))
        .drop("_raised")
    )


# -- features ---------------------------------------------------------------------------------------------------


def features_of(trace: Trace) -> pl.DataFrame:
    """Features of all signatures, one row each: code, name, value as text, kind.

    kind: b bool, i int, f float, s text, n none; v the tracked name of a tensor (no role, so never a condition),
    m the size of a mapping, c a function or class.
    """

    def build(trace: Trace) -> pl.DataFrame:
        codes: list[int] = []
        names: list[str] = []
        values: list[str] = []
        kinds: list[str] = []
        for code, features in enumerate(trace.features):
            for name, value in features.items():
                codes.append(code)
                names.append(name)
                values.append(text_of(value))
                kinds.append(_kind(name, value, features))
        return pl.DataFrame(
            {
                "code": pl.Series(codes, dtype=pl.UInt32),
                "name": pl.Series(names, dtype=pl.String),
                "value": pl.Series(values, dtype=pl.String),
                "kind": pl.Series(kinds, dtype=pl.String),
            }
        )

    return _frames.lasting(trace, Name.SIGNATURE, "features", build)


def _kind(name: str, value: Plain, features: Mapping[str, Plain]) -> str:
    if value is None:
        return "n"
    if name.endswith(".name") and name[:-5] + ".dtype" in features:
        return "v"
    if name.endswith(".len") and features.get(name[:-4] + ".type") == "mapping":
        return "m"
    if name.endswith(".value") and features.get(name[:-6] + ".type") == "function":
        return "c"
    return type(value).__name__[0]


def text_of(value: Plain) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "none" if value is None else str(value)


def argument_fields(trace: Trace, codes: Sequence[int]) -> tuple[pl.DataFrame, list[str]]:
    """What of the arguments of these functions may be a condition: one row a signature code, one column a feature.

    Types, dtypes, training flags, simple attributes of self and plain words; never sizes, numbers or paths.

    Returns:
        frame with `args`, `fcode` (equal for equal rows) and a text column a feature, and the names of those.
    """
    used = (
        distinct_of(trace)
        .filter(pl.col("fn").is_in(codes))
        .select("fn", pl.col("args").alias("code"))
        .unique()
    )
    found = features_of(trace).join(used.select("code").unique(), on="code", how="semi")
    found = found.filter(pl.col("kind").is_in(["b", "s"]) & ~pl.col("name").str.contains(_NOT_A_FIELD))
    spread = (
        found.join(used, on="code")
        .group_by("name")
        .agg(pl.col("fn").n_unique().alias("fns"), pl.col("value").n_unique().alias("values"))
        .filter((pl.col("values") <= 40) | pl.col("name").str.ends_with(".type"))
        .sort([pl.col("fns"), pl.col("name")], descending=[True, False])
        .head(_MAX_FIELDS)
    )
    names = sorted(spread["name"].to_list(), key=_field_order)
    everything = used.select("code").unique()
    if names:
        wide = found.filter(pl.col("name").is_in(names)).pivot(
            on="name", on_columns=names, index="code", values="value", aggregate_function="first"
        )
        everything = everything.join(wide, on="code", how="left")
    rows = everything.select(names).unique().with_row_index("fcode") if names else None
    keyed = (
        everything.join(rows, on=names, nulls_equal=True)
        if rows is not None
        else everything.with_columns(pl.lit(0, dtype=pl.UInt32).alias("fcode"))
    )
    return keyed.rename({"code": "args"}), names


def _field_order(name: str) -> tuple[int, str]:
    order = ("dtype", "name", "type", "training", "value")
    last = name.rpartition(".")[2]
    return (order.index(last) if last in order else 1, name)


def texts(values: Iterable[str | None], code: str, name: str) -> pl.DataFrame:
    """A lookup frame for codes 0, 1, 2, …"""
    column = list(values)
    return pl.DataFrame(
        {code: pl.Series(range(len(column)), dtype=pl.UInt32), name: pl.Series(column, dtype=pl.String)}
    )


def weights_of(trace: Trace) -> pl.DataFrame:
    """Floating dtypes of each process's parameters: proc, weights."""

    def build() -> pl.DataFrame:
        if "dtype" not in trace.metas.columns:
            return pl.DataFrame(schema={"proc": pl.UInt16, "weights": pl.String})
        parameters = trace.variables.filter((pl.col("role") == "parameter") & (pl.col("attr") == "data"))
        return (
            trace.states.select("proc", "var", "meta")
            .unique()
            .join(parameters.select("var"), on="var", how="semi")
            .join(trace.metas.select("meta", "dtype"), on="meta")
            .group_by("proc")
            .agg(pl.col("dtype").unique().sort().str.join(","))
            .rename({"dtype": "weights"})
        )

    return cached(trace, "weights", build)


def lossless(trace: Trace) -> pl.DataFrame:
    """Processes that lost no record, so that what is not there did not happen: proc."""
    kept = [i for i, p in enumerate(trace.processes) if p.dropped == 0]
    return pl.DataFrame({"proc": pl.Series(kept, dtype=pl.UInt16)})


def open_calls(trace: Trace) -> pl.DataFrame:
    """Steps in which a call began that has no row, since it had not returned when the records ended: proc, step.

    Calls within it name it as their parent. Which function it is nobody knows, so that such a step may have called any.
    """

    def build() -> pl.DataFrame:
        calls = calls_of(trace).select("proc", "seq", "step").sort("proc", "seq")
        began = trace.calls.select("proc", pl.col("parent").alias("seq")).unique().filter(pl.col("seq") > 0)
        began = began.join(trace.calls.select("proc", "seq"), on=["proc", "seq"], how="anti").sort("proc", "seq")
        beside = [began.join_asof(calls, on="seq", by="proc", strategy=side, check_sortedness=False) for side in ("backward", "forward")]
        # What began before the records of a window did is of none of its steps.
        inside = beside[0].drop_nulls("step").select("proc", "seq")
        steps = pl.concat([rows.join(inside, on=["proc", "seq"], how="semi") for rows in beside])
        return steps.drop_nulls("step").select("proc", "step").unique().sort("proc", "step")

    return cached(trace, "open_calls", build)


def table(hypotheses: Sequence[Hypothesis], *keys: str) -> pl.DataFrame:
    """Hypotheses as a frame: hyp and the named parameters as text."""
    return pl.DataFrame(
        {
            "hyp": pl.Series(range(len(hypotheses)), dtype=pl.UInt32),
            **{k: pl.Series([h.text(k) for h in hypotheses], dtype=pl.String) for k in keys},
        }
    )


def short(name: str) -> str:
    """`minids.pipe.Engine.step` → `Engine.step`."""
    parts = name.split(".")
    return ".".join(parts[-2:]) if len(parts) > 2 else name


def programs_of(trace: Trace) -> pl.DataFrame:
    """Family of each process and a short code of it, for rules that must never leave their family: proc, family, program."""

    def build() -> pl.DataFrame:
        families = trace.families.select("proc", "family")
        codes = [
            hashlib.sha256(f.encode()).hexdigest()[:8] if f else "" for f in families["family"].to_list()
        ]
        return families.with_columns(pl.Series("program", codes, dtype=pl.String))

    return cached(trace, "programs", build)


def describe(trace: Trace, frame: pl.DataFrame, codes: Sequence[int]) -> tuple[pl.DataFrame, list[str]]:
    """Add what may be a condition to rows of calls (proc, args, pfn, circ, calls), and merge equal ones.

    Equal ones stay as up to three rows, the number of examples that a clause of a precondition needs.

    Added: the circumstances, features of the arguments, parent, inputs (floating dtypes of the arguments), device,
    weights, family. `codes` are the functions that the rows are calls of.

    Returns:
        frame without args, pfn, circ and calls, and the names of the features of the arguments.
    """
    fields, names = argument_fields(trace, codes)
    keys = [c for c in frame.columns if c not in ("args", "seq", "step", "site", "calls")]
    frame = (
        frame.join(fields.select("args", "fcode"), on="args", how="left")
        .join(inputs_of(trace), on="args", how="left")
        .group_by(*keys, "fcode", "inputs", "device", _frames.news(trace).alias("new"))
        .agg(pl.col("seq", "step", "site").sort_by("seq").first(), pl.col("calls").sum())
        .drop("new")
        .join(fields.select("fcode", *names).unique("fcode"), on="fcode", how="left")
        .join(circumstances_of(trace), on="circ", how="left")
        .join(texts(trace.functions, "pfn", "parent"), on="pfn", how="left")
        .join(weights_of(trace), on="proc", how="left")
        .join(programs_of(trace).select("proc", "family"), on="proc", how="left")
    )
    times = np.minimum(frame["calls"].to_numpy().astype(np.int64), ENOUGH)
    frame = frame[np.repeat(np.arange(frame.height), times)]
    return frame.drop("circ", "pfn", "fcode", "calls"), names


def inputs_of(trace: Trace) -> pl.DataFrame:
    """Of each signature: args, inputs (floating dtypes of its tensors, sorted; "none" without), device."""

    def build(trace: Trace) -> pl.DataFrame:
        features = features_of(trace)
        dtypes = (
            features.filter(pl.col("name").str.ends_with(".dtype") & pl.col("value").str.contains(FLOATING))
            .group_by("code")
            .agg(pl.col("value").unique().sort().str.join(",").alias("inputs"))
        )
        devices = (
            features.filter(pl.col("name").str.ends_with(".device"))
            .group_by("code")
            .agg(pl.col("value").min().alias("device"))
        )
        codes = pl.DataFrame({"args": pl.Series(range(len(trace.features)), dtype=pl.UInt32)})
        return (
            codes.join(dtypes.rename({"code": "args"}), on="args", how="left")
            .join(devices.rename({"code": "args"}), on="args", how="left")
            .with_columns(pl.col("inputs").fill_null("none"))
        )

    return _frames.lasting(trace, Name.SIGNATURE, "inputs", build)
