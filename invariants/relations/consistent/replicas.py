"""Values of several ranks side by side: the part of `consistent` that speaks of replicas.

On arrays, since this is what a verifier does at the end of a step in which replicas part: of some hundred rows each query
costs more than all that follows here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import polars as pl
import pyarrow as pa

from proctor.invariants.condition import AGREE
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views.absence import alone
from proctor.invariants.schema import Name, StateFlag
from proctor.invariants.trace import Trace
from proctor.invariants.trace.grouping import Array, Groups, Rows, alike, classes, last_match, pick

NONE: Final = "none"  # said of a field that is not set, so that it can be a condition
SAID: Final = ("placement", "wrapper", "requires_grad", "dtype")  # of the parameters themselves
KEEP: Final = 6  # passing examples of one variable in one run
_MESH: Final = "any"


def replicas(trace: Trace, among: str) -> pl.DataFrame:
    return _frames.memo(trace, f"replicas {among}", lambda t: _compare_ranks(t, among), idle=alone)


def _compare_ranks(trace: Trace, among: str) -> pl.DataFrame:
    """One row a variable and step in which some rank's value changed: passed if all ranks have the same."""
    known, facts = _known(trace), _facts(trace)
    parts = _held_data(trace), _whole_gradients(trace)
    values: Rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    values = pick(values, known.owned[values["var"]])
    apart: tuple[Array, ...] = ()
    if among != "all":
        # Where all ranks begin equal the rule on all ranks says it already.
        at = last_match((values["proc"], known.model[values["var"]]), (facts.unlike["proc"], facts.unlike["model"]))
        kind = np.append(facts.unlike["clone"], 0)[at] if among == "twins" else _along(trace, among)[values["proc"]]
        there = (at >= 0) & (kind >= 0)
        values = pick(values, there)
        apart = (kind[there],)
    found, metas = _side_by_side(trace, values, *apart)
    found = found.hstack(trace.variables[["model", "name", "attr", "role", "module", "kind", "position"]][found["var"].to_numpy()].get_columns())
    run, named = found["run"].to_numpy(), known.named[found["var"].to_numpy()]
    told = facts.told[last_match((run, named), (facts.run, facts.named))]
    drifting = np.isin(run, list(_averaging(trace)))
    averaging = pl.Series("averaging", [NONE, "outside the optimizer"])[drifting.astype(np.int64)]
    found = found.hstack([*told.get_columns(), averaging, *_meta_fields(trace, metas).get_columns()])
    if among not in ("all", "twins"):  # however the models begin
        found = found.with_columns(pl.lit(_MESH).alias("model_start"))
    buffer = pl.col("role") == "buffer"
    return found.with_columns(
        # Batch statistics and counters have little in common: a rule for each kind of buffer.
        pl.when(buffer).then(pl.concat_str("module", pl.lit("."), "kind")).otherwise(pl.lit("")).alias("owner"),
        # Updates make replicas equal whoever wraps the model; gradients are equal where they are what is synchronised.
        pl.when((pl.col("attr") == "grad") | pl.col("wrapper").str.starts_with("fsdp")).then("wrapper").otherwise(pl.lit(NONE)).alias("sharding"),
        pl.col("name").alias("_name"),
        pl.col("module").alias("_owner"),
        pl.lit(0, dtype=pl.UInt32).alias("site"),
    )


def _side_by_side(trace: Trace, values: Rows, *apart: Array) -> tuple[pl.DataFrame, list[bytes]]:
    """Values of one variable on several ranks at each step: all that differ, and the first that are the same.

    Args:
        values: as those of `_filled`.
        apart: what else differs between ranks that are not held against each other.

    Returns:
        run, var, step, passed, proc, seq, and by rank _ranks, _fps, _norms; for each row the meta codes, as bytes.
    """
    order = np.lexsort((values["rank"], values["var"], values["step"]))
    values = pick(values, order)
    groups = Groups(values["run"], values["var"], values["step"], *(column[order] for column in apart))
    chosen = np.flatnonzero(groups.sizes > 1)
    first, passed = groups.first[chosen], groups.uniform(values["fp"])[chosen]
    of_variable = Groups(*(values[c][first] for c in ("run", "var")), values["step"][first] >= trace.since)
    kept = np.flatnonzero(~passed | (of_variable.running(passed) <= KEEP))
    chosen, first, passed = chosen[kept], first[kept], passed[kept]
    # A rank that lost records may hold an older value than we think.
    unsure = ~passed & groups.any(values["lossy"])[chosen]
    rows, bounds = groups.rows(chosen)
    lists = {f"_{c}s": pl.Series(pa.LargeListArray.from_arrays(pl.Series(bounds).to_arrow(), pl.Series(values[c][rows]).to_arrow())) for c in ("rank", "fp", "norm")}
    about = {c: pl.Series(values[c][first], dtype=t) for c, t in (("run", pl.UInt16), ("var", pl.UInt32), ("step", pl.Int32))}
    where = {c: pl.Series(values[c][first]) for c in ("proc", "seq")}
    decided = {"passed": pl.Series(passed).scatter(np.flatnonzero(unsure), None)}
    metas = values["meta"][rows]
    return pl.DataFrame({**about, **decided, **where, **lists}), [metas[a:b].tobytes() for a, b in pairwise(bounds.tolist())]


def axes(trace: Trace) -> list[str]:
    """Names of the mesh axes along which there are several lines of ranks in some run."""
    return sorted({axis for p in trace.processes if len(p.coords) > 1 for axis in p.coords})


def _along(trace: Trace, axis: str) -> Array:
    """A number by process for all ranks that differ in their coordinate on this axis alone; -1 for a rank without one."""
    lines: dict[str, int] = {}
    found = np.full(len(trace.processes), -1, dtype=np.int64)
    for i, p in enumerate(trace.processes):
        if len(p.coords) > 1 and axis in p.coords:
            line = json.dumps([p.run, sorted((k, v) for k, v in p.coords.items() if k != axis)])
            found[i] = lines.setdefault(line, len(lines))
    return found


def synchronised(trace: Trace) -> pl.DataFrame:
    """One row a parameter and step in which all ranks use the same gradient: passed if all have the same value.

    Placements decide what a replica is: shards may get equal gradients, and are different parts.
    """
    return _frames.memo(trace, "synchronised", _find_synchronised, idle=alone)


def _find_synchronised(trace: Trace) -> pl.DataFrame:
    known, ranks = _known(trace), _ranks(trace)
    grads = _frames.used_gradients(trace)
    proc, var, step, fp = _frames.columns(grads, "proc", "var", "step", "fp")
    flat = _frames.has_flag(grads, StateFlag.NONE | StateFlag.ZERO | StateFlag.CONSTANT | StateFlag.NONFINITE)
    mine = np.flatnonzero((ranks.run[proc] >= 0) & known.parameter[var])
    run, world, named, when = ranks.run[proc[mine]], ranks.world[proc[mine]], known.named[var[mine]], step[mine]
    groups = Groups(run, named, when, world)
    same = groups.first[(groups.sizes == world[groups.first]) & groups.uniform(fp[mine]) & ~groups.any(flat[mine])]
    held = _held_data(trace)
    held = pick(held, known.parameter[held["var"]])
    at = last_match((held["run"], known.named[held["var"]], held["step"]), (run[same], named[same], when[same]))
    found, metas = _side_by_side(trace, pick(held, at >= 0))
    parts = _meta_fields(trace, metas)["placement"].fill_null("Shard").str.contains("Shard|Partial").to_numpy()
    found = found.filter(~pl.Series(parts, dtype=pl.Boolean))
    module, kind, position, name = trace.variables[["module", "kind", "position", "name"]][found["var"].to_numpy()].get_columns()
    site = pl.Series("site", np.zeros(found.height, dtype=np.uint32))
    return found.hstack([module, kind, position, name.alias("_name"), module.alias("_owner"), site])


def _whole_gradients(trace: Trace) -> Rows:
    """Gradients that updates used on ranks of several, of steps that are whole; columns as those of `_filled`."""
    ranks, used = _ranks(trace), _frames.used_gradients(trace)
    proc, step = _frames.columns(used, "proc", "step")
    mine = np.flatnonzero((ranks.run[proc] >= 0) & _frames.is_whole(trace, proc, step))
    return _values(ranks, used, mine) | {"step": step[mine].astype(np.int64)}


def _held_data(trace: Trace) -> Rows:
    return _frames.memo(trace, "held data", _filled)


def _filled(trace: Trace) -> Rows:
    """Values of all ranks at each step in which one changed; where a rank has no row, its last value still holds.

    Columns: run, rank, lossy, proc, var, step, fp, meta, norm, seq.
    """
    ranks, values = _ranks(trace), _frames.data_by_step(trace)
    proc, var, step = (column.astype(np.int64) for column in _frames.columns(values, "proc", "var", "step"))
    rows = np.flatnonzero((ranks.run[proc] >= 0) & ~_frames.has_flag(values, StateFlag.NONE))
    rows = rows[np.lexsort((step[rows], var[rows], proc[rows]))]
    proc, var, step = proc[rows], var[rows], step[rows]
    run, changed = ranks.run[proc], values["changed"].to_numpy()[rows] & (step >= 0)
    span = int(step.max(initial=0)) + 2  # steps begin at -1
    # Events: a variable of a run, and a step. Holders: a variable of a process.
    of_run, of_proc = np.unique(run << 32 | var, return_inverse=True)[1], proc << 32 | var
    events = np.unique(of_run[changed] * span + step[changed] + 1)
    first = np.flatnonzero(np.diff(of_proc, prepend=-1))  # row of each holder's first value
    begin = np.searchsorted(events, of_run[first] * span)
    times = np.searchsorted(events, (of_run[first] + 1) * span) - begin
    holder = np.repeat(np.arange(len(first)), times)
    event = np.arange(times.sum()) - np.repeat(np.cumsum(times) - times - begin, times)
    when = events[event] % span - 1
    # The last value at or before each event: values are sorted by holder and step.
    which = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(of_proc))))
    at = np.searchsorted(which * span + step + 1, holder * span + when + 1, "right") - 1
    kept = (at >= first[holder]) & _frames.is_whole(trace, proc[first][holder], when)
    return _values(ranks, values, rows[at[kept]]) | {"step": when[kept]}


@dataclass(frozen=True)
class _Ranks:
    """Facts by process; the run of one that is no rank of several is -1."""

    run: Array
    rank: Array
    world: Array
    lossy: Array


def _ranks(trace: Trace) -> _Ranks:
    def make(trace: Trace) -> _Ranks:
        procs = _frames.replicated_runs(trace)
        at, size = procs["proc"].to_numpy(), len(trace.processes)
        run, lossy = np.full(size, -1, dtype=np.int64), np.zeros(size, dtype=bool)
        rank, world = np.zeros(size, dtype=np.int32), np.zeros(size, dtype=np.int32)
        run[at], rank[at], world[at], lossy[at] = _frames.columns(procs, "run", "rank", "world", "lossy")
        return _Ranks(run, rank, world, lossy)

    return _frames.memo(trace, "ranks", make)


def _values(ranks: _Ranks, frame: pl.DataFrame, rows: Array) -> dict[str, Array]:
    """Some rows of a frame of values, with what is known of their ranks; all but the step."""
    found = {c: frame[c].to_numpy()[rows] for c in ("proc", "var", "fp", "meta", "norm", "seq")}
    return found | {c: getattr(ranks, c)[found["proc"]] for c in ("run", "rank", "lossy")}


@dataclass(frozen=True)
class _Known:
    """Facts by variable code.

    owned, parameter: it is a parameter or buffer of a model, under its first name; it is a parameter.
    named, model: numbers, equal where model and name are the same, and where the model is.
    """

    owned: Array
    parameter: Array
    named: Array
    model: Array


def _known(trace: Trace) -> _Known:
    def make(trace: Trace) -> _Known:
        said = trace.variables
        held, role = np.zeros(said.height, dtype=bool), said["role"]
        held[_frames.owned(trace)["var"].to_numpy()] = True
        model, name = (said[c].hash().to_numpy() for c in ("model", "name"))
        of_model = classes(model)
        parameter = held & (role == "parameter").to_numpy()
        return _Known(parameter | held & (role == "buffer").to_numpy(), parameter, alike(of_model, classes(name)), of_model)

    return _frames.lasting(trace, Name.VARIABLE, "known", make)


@dataclass(frozen=True)
class _Facts:
    """How variables and models begin, on the ranks of a run.

    told: of each variable start, model_start, structure, p2p; then a row of nulls.
    run, named: which these are, as in `_Known`.
    unlike: models that do not begin equal on all ranks: proc, model, and clone, equal where they begin equal.
    """

    told: pl.DataFrame
    run: Array
    named: Array
    unlike: Rows


def _facts(trace: Trace) -> _Facts:
    return _frames.memo(trace, "rank facts", _collect_facts)


def _collect_facts(trace: Trace) -> _Facts:
    first, procs = _frames.first_values(trace), _frames.replicated_runs(trace)
    said = [first.hash_rows().to_numpy().tobytes(), procs.hash_rows().to_numpy().tobytes(), len(trace.texts[Name.META]).to_bytes(8, "little")]
    return _frames.settled(trace, Name.VARIABLE, "rank facts", said, lambda: _told_facts(trace, _facts_of(trace, first, procs)))


def _told_facts(trace: Trace, facts: pl.DataFrame) -> _Facts:
    known = _known(trace)
    told = facts.select("start", "model_start", "structure", "p2p")
    var = facts["var"].to_numpy()
    unlike = facts.filter(pl.col("model_start") != "equal").select("proc", "var", "clone")
    return _Facts(
        pl.concat([told, told.clear(1)]),
        facts["run"].to_numpy(),
        known.named[var],
        {
            "proc": unlike["proc"].to_numpy(),
            "model": known.model[unlike["var"].to_numpy()],
            "clone": classes(unlike["clone"].to_numpy()).astype(np.int64),
        },
    )


def _facts_of(trace: Trace, first: pl.DataFrame, procs: pl.DataFrame) -> pl.DataFrame:
    """What is known of a variable on the ranks of a run: proc, var, run, start, model_start, structure, clone, p2p."""
    first = first.join(procs, on="proc").join(_frames.metas(trace, "shape"), on="meta", how="left")
    first = first.join(_frames.owned(trace).select("var", "model", "name", "role"), on="var")
    constant = _frames.has(int(StateFlag.CONSTANT | StateFlag.ZERO))
    ranks = ["run", "model", "name"]
    first = first.with_columns(
        (pl.col("fp").n_unique().over(ranks) == 1).alias("_equal"),
        constant.all().over(ranks).alias("_constant"),
        pl.len().over(ranks).alias("_held"),
        # A bias that begins with zeros everywhere may still be a shard: it is what the weight beside it is.
        pl.col("name").str.replace(r"\.?[^.]*$", "").alias("_path"),
    )
    told = (pl.col("role") == "parameter") & ~pl.col("_constant") & (pl.col("_held") > 1)
    models = first.group_by("run", "model").agg(
        pl.col("_equal").filter(told).all().alias("_all"), pl.col("_equal").filter(told).any().alias("_any")
    )
    shapes = first.sort("name").group_by("run", "proc", "model").agg(
        pl.concat_str("name", pl.col("shape").fill_null("")).hash().sum().alias("_shape"),
        pl.struct("name", "fp").hash().filter(pl.col("role") == "parameter").sum().alias("clone"),
    )
    shapes = shapes.with_columns(
        pl.when(pl.col("_shape").n_unique().over("run", "model") == 1).then(pl.lit("same")).otherwise(pl.lit("different")).alias("structure")
    )
    first = first.join(models, on=["run", "model"]).join(shapes.drop("_shape"), on=["run", "proc", "model"])
    return first.select(
        "proc",
        "var",
        "run",
        "structure",
        "clone",
        pl.when((pl.col("_equal") | (pl.col("role") != "parameter")).all().over("run", "model", "_path")).then(pl.lit("equal")).otherwise(pl.lit("different")).alias("start"),
        pl.when("_all").then(pl.lit("equal")).when("_any").then(pl.lit("mixed")).otherwise(pl.lit("different")).alias("model_start"),
        pl.when("p2p").then(pl.lit("true")).otherwise(pl.lit("false")).alias("p2p"),
    )


def _averaging(trace: Trace) -> set[int]:
    """Runs whose ranks drift apart and are brought together again outside the optimizer (local SGD).

    Replicas of such a program differ in between, on purpose.
    """
    return _frames.memo(trace, "averaging", _find_averaging)


def _find_averaging(trace: Trace) -> set[int]:
    ranks, rows, updates = _ranks(trace), _frames.rows(trace), _frames.updates(trace)
    proc, var, step, call = _frames.columns(rows, "proc", "var", "step", "call")
    data = _frames.lasting(trace, Name.VARIABLE, "data of parameters", _data_of_parameters)
    mine = data[var] & (ranks.run[proc] >= 0)
    written = mine & rows["fresh"].to_numpy() & (step >= 0)
    written &= last_match((proc, call), (updates["proc"].to_numpy(), updates["seq"].to_numpy())) < 0
    at, fp = np.flatnonzero(written), rows["fp"].to_numpy()
    if not len(at):
        return set()
    of, before = proc[at], fp[_frames.previous_of(rows)[at]]
    groups = Groups(ranks.run[of], var[at], step[at])
    everywhere = groups.distinct(of) == ranks.world[of][groups.first]
    together = everywhere & groups.uniform(fp[at]) & ~groups.uniform(before)
    return set(ranks.run[of][groups.first[together]].tolist())


def _data_of_parameters(trace: Trace) -> Array:
    data: Array = _known(trace).parameter & (trace.variables["attr"] == "data").to_numpy()
    return data


def _meta_fields(trace: Trace, lists: Sequence[bytes]) -> pl.DataFrame:
    """What all ranks' metas say of the parameter, for each of these lists of meta codes."""
    which: dict[bytes, int] = {}
    of = np.array([which.setdefault(one, len(which)) for one in lists], dtype=np.int64)
    return _frames.settled(trace, Name.META, "meta fields", list(which), lambda: _fields_of(trace, list(which)))[of]


def _fields_of(trace: Trace, lists: Sequence[bytes]) -> pl.DataFrame:
    attributes = [c for c in trace.metas.columns if c.startswith("attr.")]
    said = _frames.metas(trace, *attributes, *SAID, "shape")
    out: dict[str, list[Any]] = {c: [] for c in ("marks", "shapes", *attributes, *SAID)}
    agreed: dict[str, list[bool]] = {c + AGREE: [] for c in (*attributes, *SAID)}
    for codes in lists:
        found = said[np.unique(np.frombuffer(codes, dtype=np.uint32))].to_dicts()
        for column in (*attributes, *SAID):
            values = {row[column] for row in found}
            if column in ("wrapper", "placement"):
                values = {v or NONE for v in values}
            out[column].append(next(iter(values)) if len(values) == 1 else None)
            agreed[column + AGREE].append(len(values) == 1)
        marks = sorted({word for row in found for word in _frames.marks(row)})
        out["marks"].append(",".join(marks) or NONE)
        out["shapes"].append("equal" if len({row["shape"] for row in found}) == 1 else "different")
    schema: dict[str, Any] = dict.fromkeys(out, pl.String) | dict.fromkeys(agreed, pl.Boolean)
    return pl.DataFrame({**out, **agreed}, schema=schema)
