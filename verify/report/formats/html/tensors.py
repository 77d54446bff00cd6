"""What became of each parameter and buffer of a run: which stopped being equal on replicas, turned non-finite, or stood still.

Facts of the records, not verdicts: a rule may allow replicas to differ between two averagings. Ranks count as replicas
of each other when their models began with the same values; ranks that began different (shards) are not compared. All
tables are read column by column, whatever the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import polars as pl

from proctor.invariants.schema import StateFlag
from proctor.invariants.trace import Trace

COLUMNS: Final = 60
_ROUNDING: Final = 1e-6  # share of a model's largest gradient, below which one is no reason to move
CHANGED, DIFFERS, BROKEN = 1, 2, 3  # what is drawn of a tensor in a column of steps, worst last

Key = tuple[str, str]  # class of the root module, name of the tensor


@dataclass
class Tensor:
    """One parameter or buffer over the run.

    differs: first step at whose end replicas that were equal had other values.
    minority: the ranks that then differed from most others; all of them where there is no majority.
    broken: first step with a NaN or an infinity in the value, its gradient or its optimizer state, and which of them.
    still: it is trained and never changed in a training step.
    cells: what to draw, by column.
    """

    model: str
    name: str
    owner: str = ""
    role: str = "parameter"
    shape: str = ""
    differs: int | None = None
    minority: list[int] = field(default_factory=list)
    majority: bool = False
    broken: int | None = None
    broken_in: str = ""
    broken_ranks: list[int] = field(default_factory=list)
    still: bool = False
    cells: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Tensors:
    """All tensors in the order in which the models register them.

    per_column: steps that one column stands for.
    replicas: ranks that some other rank replicates.
    """

    found: dict[Key, Tensor]
    steps: int
    per_column: int
    replicas: int


def tensors(trace: Trace, *, limit: int = COLUMNS) -> Tensors:
    """Read a run off its states."""
    steps = max(1, trace.steps)
    per_column = -(-steps // limit)
    rows = _rows(trace)
    found = _known(trace, rows)
    column = (pl.col("step") // per_column).alias("column")
    data = rows.filter(pl.col("attr") == "data")
    own = data.filter(pl.col("role") == "parameter")  # buffers follow each rank's own batches
    last = own.group_by("proc", "model", "name", "step", maintain_order=True).agg(pl.col("fp").last())
    moved = _moved(data)
    for model, name, at in moved.select("model", "name", column).unique().iter_rows():
        _mark(found, (model, name), at, CHANGED)
    _still(found, moved, trace)
    broken = rows.filter(pl.col("broken"))
    for model, name, at in broken.filter(pl.col("step") >= 0).select("model", "name", column).unique().iter_rows():
        _mark(found, (model, name), at, BROKEN)
    _broken(found, broken.join(trace.procs.select("proc", "rank"), on="proc"))
    twins = _twins(data)
    pairs = twins.filter(pl.len().over("twin") > 1)
    if pairs.height:
        apart = _apart(trace, last.join(pairs, on="proc"), pairs)
        for model, name, at in apart.select("model", "name", column).unique().iter_rows():
            _mark(found, (model, name), at, DIFFERS)
        _differs(found, apart, last.join(pairs, on="proc"), trace)
    return Tensors(found, steps, per_column, pairs.height)


def _rows(trace: Trace) -> pl.DataFrame:
    """proc, step, model, name, attr, fp, constant, broken of every value that was read."""
    flag = pl.col("flags")
    named = trace.variables.filter((pl.col("name") != "") & (pl.col("alias") == "") & pl.col("role").is_in(["parameter", "buffer", "optimizer"]))
    return (
        trace.states.filter((flag & int(StateFlag.UNHASHED | StateFlag.NONE)) == 0)
        .join(named.select("var", "model", "name", "attr", "role"), on="var", maintain_order="left")
        .join(trace.contexts.select("ctx", "step"), on="ctx", maintain_order="left")
        .select(
            "proc", "step", "model", "name", "attr", "role", "fp", "meta", "var",
            ((flag & int(StateFlag.CONSTANT | StateFlag.ZERO)) > 0).alias("constant"),
            ((flag & int(StateFlag.NONFINITE)) > 0).alias("broken"),
        )
    )  # fmt: skip


def _known(trace: Trace, rows: pl.DataFrame) -> dict[Key, Tensor]:
    said = trace.metas.select("meta", *(c for c in ("shape", "requires_grad") if c in trace.metas.columns))
    first = (
        rows.filter((pl.col("attr") == "data") & (pl.col("role") != "optimizer"))
        .group_by("model", "name")
        .agg(pl.col("var").min(), pl.col("meta").last(), pl.col("role").first())
        .join(said, on="meta", how="left")
        .join(trace.variables.select("var", "module"), on="var", how="left")
        .sort("var")
    )
    return {
        (row["model"], row["name"]): Tensor(
            row["model"], row["name"], row["module"] or "", row["role"], (row.get("shape") or "").strip("[]").replace(",", " × ")
        )
        for row in first.iter_rows(named=True)
    }


def _moved(data: pl.DataFrame) -> pl.DataFrame:
    """Rows of a training step that have other bits than the row before."""
    before = pl.col("fp").shift(1).over("proc", "model", "name")
    return data.filter((before != pl.col("fp")) & (pl.col("step") >= 0))


def _still(found: dict[Key, Tensor], moved: pl.DataFrame, trace: Trace) -> None:
    """Parameters of a model that trains which have a gradient to follow, more than rounding, and never moved."""
    if trace.steps < 2 or moved.is_empty():
        return
    live = set(moved.select("model", "name").unique().iter_rows())
    flags = int(StateFlag.NONE | StateFlag.ZERO)
    largest = pl.col("norm").filter(pl.col("norm").is_finite()).max()
    given = set(
        trace.states.filter((pl.col("flags") & flags) == 0)
        .join(trace.variables.filter((pl.col("attr") == "grad") & (pl.col("alias") == "")), on="var")
        .filter(pl.col("norm") > _ROUNDING * largest.over("model"))
        .select("model", "name")
        .unique()
        .iter_rows()
    )
    for key, tensor in found.items():
        tensor.still = tensor.role == "parameter" and key in given and key not in live


def _broken(found: dict[Key, Tensor], broken: pl.DataFrame) -> None:
    first = pl.col("step").min().over("model", "name")
    at_first = broken.filter(pl.col("step") == first)
    for row in (
        at_first.group_by("model", "name")
        .agg(pl.col("step").first(), pl.col("attr").first(), pl.col("rank").unique().sort())
        .iter_rows(named=True)
    ):
        tensor = found.get((row["model"], row["name"]))
        if tensor is not None:
            tensor.broken, tensor.broken_in, tensor.broken_ranks = row["step"], row["attr"], row["rank"]


def _twins(data: pl.DataFrame) -> pl.DataFrame:
    """proc, twin: processes whose models began with the same values; what began constant says nothing."""
    start = (
        data.filter(~pl.col("constant"))
        .with_columns((pl.col("step") < 0).any().over("proc").alias("_early"))
        .filter((pl.col("step") < 0) | ~pl.col("_early"))
    )
    held = start.group_by("proc", "model", "name", maintain_order=True).agg(
        pl.when(pl.col("step").first() < 0).then(pl.col("fp").last()).otherwise(pl.col("fp").first()).alias("fp")
    )
    whole = held.group_by("proc").agg(pl.struct("model", "name", "fp").hash(seed=7).sum().alias("twin"))
    return whole.sort("proc")


def _apart(trace: Trace, last: pl.DataFrame, pairs: pl.DataFrame) -> pl.DataFrame:
    """twin, model, name, step where twins differ: other values, or one has changed and another has not.

    Only steps that all of them have finished count, and only tensors that were equal before.
    """
    reached = (
        trace.states.join(trace.contexts.select("ctx", "step"), on="ctx").group_by("proc").agg(pl.col("step").max().alias("reached"))
    )
    until = pairs.join(reached, on="proc").group_by("twin").agg(pl.col("reached").min(), pl.len().alias("members"))
    unfinished = any(not p.finished for p in trace.processes)
    holders = last.group_by("twin", "model", "name").agg(pl.col("proc").n_unique().alias("holders"))
    seen = (
        last.group_by("twin", "model", "name", "step")
        .agg(pl.len().alias("n"), pl.col("fp").min().alias("low"), pl.col("fp").max().alias("high"))
        .join(holders, on=["twin", "model", "name"])
        .join(until, on="twin")
        .filter((pl.col("holders") > 1) & (pl.col("step") < pl.col("reached") + (0 if unfinished else 1)))
        .with_columns(((pl.col("low") == pl.col("high")) & (pl.col("n") == pl.col("holders"))).alias("equal"))
        .sort("twin", "model", "name", "step")
    )
    once = pl.col("equal").cum_max().shift(1).over("twin", "model", "name").fill_null(value=False)
    return seen.filter(~pl.col("equal") & once & (pl.col("step") >= 0))


def _differs(found: dict[Key, Tensor], apart: pl.DataFrame, last: pl.DataFrame, trace: Trace) -> None:
    first = apart.group_by("model", "name").agg(pl.col("step").min(), pl.col("twin").sort_by("step").first())
    rank = trace.procs.select("proc", "rank")
    sides = (
        last.join(first.rename({"step": "_at"}), on=["model", "name", "twin"])
        .filter(pl.col("step") <= pl.col("_at"))
        .group_by("model", "name", "proc", maintain_order=True)
        .agg(pl.col("fp").last(), pl.col("_at").first())
        .join(rank, on="proc")
        .group_by("model", "name", "_at", "fp")
        .agg(pl.col("rank").sort())
        .sort(pl.col("rank").list.len(), descending=True)
        .group_by("model", "name", "_at", maintain_order=True)
        .agg(pl.col("rank"))
    )
    for model, name, at, groups in sides.iter_rows():
        tensor = found.get((model, name))
        if tensor is None:
            continue
        tensor.differs = at
        tensor.majority = len(groups) > 1 and len(groups[0]) > len(groups[1])
        tensor.minority = sorted(r for g in groups[1 if tensor.majority else 0 :] for r in g)


def _mark(found: dict[Key, Tensor], key: Key, column: int | None, kind: int) -> None:
    tensor = found.get(key)
    if tensor is not None and column is not None:
        tensor.cells[column] = max(kind, tensor.cells.get(column, 0))
