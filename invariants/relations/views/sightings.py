"""Values at calls with the circumstances in which they were seen, and whether each was seen before.

A *session* is what runs between constructions of optimizers: a program that trains several models in turn (folds, trials)
rightly begins each with the same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import polars as pl

from proctor.invariants.invariant import Hypothesis
from proctor.invariants.relations import Detail, Examples
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.schema import Name, Value
from proctor.invariants.trace import Trace
from proctor.invariants.trace.grouping import Array

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
_BITS: Final = 34  # a sequence number or a step has fewer


def sightings(trace: Trace, kind: Value) -> pl.DataFrame:
    """Values of a kind: the columns of `values`, text (of the place), step, micro, phase, recompute, session.

    In the order in which they were seen.
    """
    return _frames.memo(trace, f"sightings {kind.name}", lambda t: _sightings(t, kind))


def _sightings(trace: Trace, kind: Value) -> pl.DataFrame:
    found = trace.values[np.flatnonzero(trace.values["kind"].to_numpy() == int(kind))]
    if not found.height:  # so of most kinds in most windows
        return _frames.memo(trace, "no sightings", lambda t: _placed(t, t.values.clear()))
    return _placed(trace, found)


def _placed(trace: Trace, found: pl.DataFrame) -> pl.DataFrame:
    places = _frames.lasting(trace, Name.PLACE, "places", lambda t: pl.Series("text", [*t.places, None], dtype=pl.String))
    found = found.hstack([places[np.minimum(found["place"].to_numpy(), len(places) - 1)]])
    step, *others = _frames.of_context(trace, found, "step", "micro", "phase", "recompute")
    return with_session(trace, found.hstack([step.fill_null(-1) if step.null_count() else step, *others]))


def options(trace: Trace) -> pl.DataFrame:
    """Options of groups at updates: the columns of `sightings`, and `when`; not how many updates were counted."""
    rows = sightings(trace, Value.OPTION).join(_frames.metas(trace, "when"), on="meta", how="left", maintain_order="left")
    return rows.filter((pl.col("when") == "update") & (pl.col("text") != "step") & (pl.col("step") >= 0))


def with_session(trace: Trace, rows: pl.DataFrame) -> pl.DataFrame:
    """Add `session`: how many optimizers had been constructed; rows without a call belong to what follows their step."""
    created = _frames.memo(trace, "optimizers created", _created)
    procs, seqs, steps = _frames.columns(rows, "proc", "seq", "step")
    session = np.where(seqs > 0, _nth(created.calls, procs, seqs), _nth(created.steps, procs, steps))
    return rows.hstack([pl.Series("session", session, dtype=pl.UInt32)])


class _Created(NamedTuple):
    """Constructions of optimizers, by process and number of the call, and by process and step: sorted keys, and how many there had been by then."""

    calls: tuple[Array, Array]
    steps: tuple[Array, Array]


def _created(trace: Trace) -> _Created:
    procs, seqs, steps = _frames.columns(_frames.calls_of(trace, CREATED.replace(".", r"\.")), "proc", "seq", "step")
    order = np.argsort(_key(procs, seqs))
    procs, seqs, steps = procs[order], seqs[order], steps[order]
    count = np.arange(len(procs)) - np.searchsorted(procs, procs, "left") + 1
    by_step = _key(procs, steps)
    known = np.flatnonzero(steps > _frames.UNTOLD)
    known = known[np.argsort(by_step[known], kind="stable")]
    return _Created((_key(procs, seqs), count), (by_step[known], count[known]))


def _key(procs: Array, numbers: Array) -> Array:
    """Process and number, of 32 bits or less than none, as one that orders them."""
    key: Array = (procs.astype(np.int64) << _BITS) + numbers.astype(np.int64) + (1 << 32)
    return key


def _nth(created: tuple[Array, Array], procs: Array, numbers: Array) -> Array:
    """How many of these there had been in a process by this number."""
    keys, count = created
    last = np.searchsorted(keys, _key(procs, numbers), "right") - 1
    if not len(keys):
        return np.zeros(len(procs), dtype=np.int64)
    found: Array = np.where((last >= 0) & (keys[last] >> _BITS == procs), count[last], 0)
    return found


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
    at = _frames.call_at(trace, rows)
    site, code = (pl.Series(name, np.append(trace.calls[name].to_numpy(), none)[at], dtype=pl.UInt32) for name, none in (("site", 0), ("fn", len(trace.functions))))
    return rows.hstack([site, _frames.function_names(trace, code).alias("function")])


def example(rows: pl.DataFrame, **columns: Any) -> pl.DataFrame:
    """Bring rows into the form of `EXAMPLE`; missing columns are null."""
    given = {k: (pl.lit(v) if isinstance(v, str) else v) for k, v in columns.items()}
    known, zero = {*rows.columns, *given}, ("seq", "site")
    made = {c: given[c].cast(EXAMPLE[c], strict=False).alias(c) if c in given else _CASTS[c] for c in EXAMPLE if c in known}
    return rows.select((made[c].fill_null(0) if c in zero else made[c]) if c in known else pl.lit(0 if c in zero else None, dtype=t).alias(c) for c, t in EXAMPLE.items())


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
