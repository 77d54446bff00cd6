"""Values at calls with the circumstances in which they were seen, and whether each was seen before.

A *session* is what runs between constructions of optimizers: a program that trains several models in turn (folds, trials)
rightly begins each with the same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import polars as pl

from proctor.invariants.invariant import Hypothesis
from proctor.invariants.relations import Detail, Examples
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.schema import Name, Value
from proctor.invariants.trace import Trace

CREATED: Final = "torch.optim.Optimizer.__init__"
# Columns of the examples of every mode.
EXAMPLE: Final[dict[str, Any]] = {
    "mode": pl.String,
    "what": pl.String,
    "family": pl.String,
    "passed": pl.Boolean,
    "proc": pl.UInt16,
    "step": pl.Int32,
    "seq": pl.UInt32,
    "site": pl.UInt32,
    "_seen": pl.String,
    "_expected": pl.String,
    "_function": pl.String,
    "_variable": pl.String,
    "_sides": pl.List(pl.List(pl.Int32)),  # ranks that agree, as `Detail.sides`
}
MANY: Final = 8  # passing examples that are kept of one thing in one process
_CASTS: Final = {name: pl.col(name).cast(kind, strict=False) for name, kind in EXAMPLE.items()}
_NO_SITE: Final = (pl.lit(0, dtype=pl.UInt32).alias("site"), pl.lit(None, dtype=pl.String).alias("function"))
_FEW: Final = 8  # times fewer rows than calls: those that may be theirs are looked for first


def sightings(trace: Trace, kind: Value) -> pl.DataFrame:
    """Values of a kind: the columns of `values`, text (of the place), step, micro, phase, recompute, session.

    In the order in which they were seen.
    """
    return _frames.memo(trace, f"sightings {kind.name}", lambda t: _sightings(t, kind))


def _sightings(trace: Trace, kind: Value) -> pl.DataFrame:
    found = trace.values.filter(pl.col("kind") == int(kind))
    if not found.height:  # so of most kinds in most windows
        return _frames.memo(trace, "no sightings", lambda t: _placed(t, t.values.clear()))
    return _placed(trace, found)


def _placed(trace: Trace, found: pl.DataFrame) -> pl.DataFrame:
    places = _frames.lasting(trace, Name.PLACE, "places", _places)
    found = found.join(places, on="place", how="left", maintain_order="left")
    contexts = _frames.memo(trace, "contexts of sightings", lambda t: t.contexts.select("ctx", "step", "micro", "phase", "recompute"))
    found = found.join(contexts, on="ctx", how="left", maintain_order="left")
    return with_session(trace, found.with_columns(pl.col("step").fill_null(-1)))


def _places(trace: Trace) -> pl.DataFrame:
    return pl.DataFrame(
        {
            "place": pl.Series(range(len(trace.places)), dtype=pl.UInt32),
            "text": pl.Series(trace.places, dtype=pl.String),
        }
    )


def options(trace: Trace) -> pl.DataFrame:
    """Options of groups at updates: the columns of `sightings`, and `when`; not how many updates were counted."""
    rows = sightings(trace, Value.OPTION).join(_frames.metas(trace, "when"), on="meta", how="left", maintain_order="left")
    return rows.filter((pl.col("when") == "update") & (pl.col("text") != "step") & (pl.col("step") >= 0))


def with_session(trace: Trace, rows: pl.DataFrame) -> pl.DataFrame:
    """Add `session`: how many optimizers had been constructed; rows without a call belong to what follows their step."""
    created = _frames.memo(trace, "optimizers created", _created)
    if not created.height:
        return rows.with_columns(pl.lit(0, dtype=pl.UInt32).alias("session"))
    order = pl.int_range(pl.len()).alias("_row")
    by_call = (
        rows.with_columns(order)
        .sort("seq")
        .join_asof(
            created.select("proc", pl.col("seq").alias("seq"), pl.col("nth").alias("_call")).sort("seq"),
            on="seq",
            by="proc",
            strategy="backward",
            check_sortedness=False,
        )
    )
    by_step = by_call.sort("step").join_asof(
        created.select("proc", "step", pl.col("nth").alias("_step")).sort("step", "_step"),
        on="step",
        by="proc",
        strategy="backward",
        check_sortedness=False,
    )
    session = pl.when(pl.col("seq") > 0).then("_call").otherwise("_step").fill_null(0).cast(pl.UInt32)
    return by_step.sort("_row").with_columns(session.alias("session")).drop("_row", "_call", "_step")


def _created(trace: Trace) -> pl.DataFrame:
    found = _frames.calls_of(trace, CREATED.replace(".", r"\.")).sort("proc", "seq")
    return found.select(
        "proc", "seq", "step", pl.int_range(1, pl.len() + 1, dtype=pl.UInt32).over("proc").alias("nth")
    )


def new_ones(rows: pl.DataFrame, by: list[str]) -> pl.DataFrame:
    """Add `passed`, whether no earlier row of the same group has the same content, and `_before`, the step of the first."""
    # Groups of five columns, some of them text, cost ten times those of one number.
    rows = rows.with_columns(pl.struct(by).hash(0).alias("_of")).with_columns(pl.struct("_of", "fp").hash(0).alias("_same"))
    return rows.with_columns(
        (pl.int_range(pl.len()).over("_same") == 0).alias("passed"),
        pl.col("step").first().over("_same").alias("_before"),
        pl.int_range(pl.len()).over("_of").alias("_nth"),
    ).drop("_of", "_same")


def thin(found: pl.DataFrame, by: list[str]) -> pl.DataFrame:
    """The first passing examples of each group, and the first failing ones."""
    return found.filter(pl.int_range(pl.len()).over([*by, "passed"]) < MANY)


def sites(trace: Trace, rows: pl.DataFrame) -> pl.DataFrame:
    """Add the source line, and name of the function, of the call that each row belongs to: site, function."""
    if not rows.height:
        return rows.with_columns(_NO_SITE)
    calls = trace.calls
    if rows.height < calls.height // _FEW:
        calls = calls.filter(pl.col("seq").is_in(rows["seq"].implode()))
    names = _frames.lasting(trace, Name.FUNCTION, "names of functions", _names)
    calls = calls.select("proc", "seq", "site", "fn").join(names, on="fn", how="left").drop("fn")
    return rows.join(calls, on=["proc", "seq"], how="left", maintain_order="left").with_columns(
        pl.col("site").fill_null(0)
    )


def _names(trace: Trace) -> pl.DataFrame:
    return pl.DataFrame(
        {
            "fn": pl.Series(range(len(trace.functions)), dtype=pl.UInt32),
            "function": pl.Series(trace.functions, dtype=pl.String),
        }
    )


def example(rows: pl.DataFrame, **columns: Any) -> pl.DataFrame:
    """Bring rows into the form of `EXAMPLE`; missing columns are null."""
    given = {k: (pl.lit(v) if isinstance(v, str) else v) for k, v in columns.items()}
    known, zero = {*rows.columns, *given}, ("seq", "site")
    return rows.with_columns(**given).select(
        (_CASTS[c].fill_null(0) if c in zero else _CASTS[c]) if c in known else pl.lit(0 if c in zero else None, dtype=t).alias(c)
        for c, t in EXAMPLE.items()
    )


def of_parts(
    trace: Trace, relation: str, parts: Mapping[str, Callable[[Trace], pl.DataFrame]]
) -> pl.DataFrame:
    """Examples in the form of `EXAMPLE` of several makers, each made once for a trace."""
    frames = [_frames.memo(trace, f"{relation} {name}", make) for name, make in parts.items()]
    return pl.concat([*frames, pl.DataFrame(schema=EXAMPLE)])


def held(relation: str, found: pl.DataFrame) -> list[Hypothesis]:
    """A hypothesis for each `mode`, `what` and `family` of which an example passed."""
    rows = found.filter("passed").select("mode", "what", "family").unique()
    return [Hypothesis.of(relation, **{k: v for k, v in row.items() if v is not None}) for row in rows.to_dicts()]


def detail(example: Mapping[str, Any], advice: str, *, expected: str = "", **more: str) -> Detail:
    """What an example in the form of `EXAMPLE` says of itself.

    Args:
        example: the row.
        advice: what to look at.
        expected: where the row does not say it.
        more: further fields of `Detail`, or others in the place of the row's.
    """
    texts = {name: example[f"_{name}"] or "" for name in ("expected", "seen", "function", "variable")}
    sides = tuple(map(tuple, example.get("_sides") or ()))
    return Detail(**{**texts, "expected": texts["expected"] or expected, "advice": advice, "sides": sides, **more})  # type: ignore[arg-type]


def bound_examples(trace: Trace, found: pl.DataFrame, hypotheses: Sequence[Hypothesis]) -> Examples:
    """Those of these examples that hypotheses with `mode`, `what` and perhaps `family` speak of."""
    keys = ("mode", "what", "family")
    index = pl.DataFrame(
        [(i, *(h.get(k) for k in keys)) for i, h in enumerate(hypotheses)],
        schema={"hyp": pl.UInt32} | dict.fromkeys(keys, pl.String),
        orient="row",
    )
    found = found.rename({"family": "_family"}).join(
        index.rename({"family": "_bound"}), on=["mode", "what"], maintain_order="left"
    )
    found = found.filter(pl.col("_bound").is_null() | pl.col("_bound").eq_missing(pl.col("_family")))
    found = found.join(trace.families, on="proc", how="left", maintain_order="left")
    return Examples(found.drop("mode", "what", "_bound", "_family"), ("family",))
