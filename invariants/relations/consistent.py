"""Values that are one thing stay one thing: replicas agree on all ranks, and tied parameters stay equal.

`mode="ranks"`: a parameter, gradient or buffer has the same bits on every rank that holds it, after every step.
Catches a gradient that is not synchronised, clipping on one rank only, a forward that bypasses DDP, a replica that
was loaded from another checkpoint. `among="twins"` says the same of those ranks only whose models begin equal, which
reaches data-parallel replicas of tensor-parallel shards. `among="dp"`, or another axis of the program's mesh, says it
of ranks that differ in their place on that axis alone, however their models begin.
`mode="tied"`: two parameters of one model that begin with the same value stay equal while training changes them.
Catches weight tying that was undone by a resize, a copy or a wrapper.

Source: TrainCheck §3.2, the Consistent relation. Differs in that pairs are not enumerated: replicas are grouped by
name and equal fingerprints by value, so cost is linear in records.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np
import polars as pl

from proctor.invariants.condition import AGREE
from proctor.invariants.invariant import Hypothesis
from proctor.invariants.relations import Detail, Examples, Needs, Reads, Relation, _frames, register
from proctor.invariants.schema import StateFlag
from proctor.invariants.trace import Trace

_ATTRIBUTES: Final = ("attr.tensor_model_parallel", "attr.model_parallel", "attr.partition_dim", "attr.is_expert")
_SAID: Final = ("placement", "wrapper", "requires_grad", "dtype")  # of the parameters themselves
_SCOPE: Final = ("family", "placement", "p2p", "structure", "start", "marks", "averaging")
# What is never generalised: gradients of wrapped models say nothing of unwrapped ones, nor replicas of shards.
_BOUND: Final = ("role", "attr", "owner", "sharding", "model_start")
_PARALLEL: Final = {"equal": "whose models begin equal", "mixed": "whose models begin equal in part", "different": "whose models begin different"}
_MESH: Final = "any"
_KEEP: Final = 6  # passing examples of one variable in one run
_NONE: Final = "none"  # said of a field that is not set, so that it can be a condition


@register
class Consistent(Relation):
    """Replicas agree on all ranks, tied parameters stay equal."""

    name = "consistent"
    code = "PR101"
    upstream: ClassVar[int] = 3
    ahead: ClassVar[int] = 0
    reads: ClassVar[Reads] = "records"

    def propose(self, trace: Trace) -> list[Hypothesis]:
        found: list[Hypothesis] = []
        for among in ("all", "twins", *_axes(trace)):
            same = _replicas(trace, among).filter("passed")
            for bound in same.select(_BOUND).unique().to_dicts():
                found.append(Hypothesis.of("consistent", mode="ranks", among=among, **bound))
        if _synchronised(trace)["passed"].any():
            found.append(Hypothesis.of("consistent", mode="synced", among="synchronised", attr="data"))
        for roles in _equal_roles(trace).filter("passed").select("a", "b").unique().rows():
            found.append(Hypothesis.of("consistent", mode="tied", by="role", a=roles[0], b=roles[1]))
        aliases = trace.variables.filter(
            (pl.col("alias") != "") & (pl.col("attr") == "data") & (pl.col("role") == "parameter")
        )
        for model, a, b in aliases.select("model", "alias", "name").unique().rows():
            found.append(Hypothesis.of("consistent", mode="tied", by="name", model=model, a=a, b=b))
        return found

    def examples(self, trace: Trace, hypotheses: Sequence[Hypothesis]) -> Examples:
        keys = ("mode", "among", "by", "model", "a", "b", *_BOUND)
        index = pl.DataFrame(
            [(i, *(h.get(k) for k in keys)) for i, h in enumerate(hypotheses)],
            schema={"hyp": pl.UInt32} | dict.fromkeys(keys, pl.String),
            orient="row",
        )
        parts: list[pl.DataFrame] = []
        modes = set(index["mode"])
        if "ranks" in modes:
            for among in index.filter(pl.col("mode") == "ranks")["among"].unique().to_list():
                wanted = index.filter((pl.col("mode") == "ranks") & (pl.col("among") == among))
                parts.append(_replicas(trace, among).join(wanted.select("hyp", *_BOUND), on=list(_BOUND)))
        if "synced" in modes:
            parts.append(_synchronised(trace).join(index.filter(pl.col("mode") == "synced").select("hyp"), how="cross"))
        if "tied" in modes:
            tied = index.filter(pl.col("mode") == "tied")
            roles, names = tied.filter(pl.col("by") == "role"), tied.filter(pl.col("by") == "name")
            if roles.height:
                parts.append(_equal_roles(trace).join(roles.select("hyp", "a", "b"), on=["a", "b"]))
            if names.height:
                parts.append(_named_pairs(trace, names))
        known = [c for c in trace.metas.columns if c.startswith("attr.")]
        attributes = [c for c in _ATTRIBUTES if c in known] + sorted(set(known) - set(_ATTRIBUTES))
        fields = (*attributes, *_SAID, "marks", "p2p", "structure", "start", "averaging", "shapes", "module", "kind", "position", "family")
        return Examples(_stack(parts, fields), fields, _SCOPE)

    def needs(self, hypothesis: Hypothesis) -> Needs:
        if hypothesis["mode"] == "synced":
            return Needs(frozenset({_frames.UPDATE}), frozenset({"data", "grad"}))
        attr = "buffer" if hypothesis.get("role") == "buffer" else hypothesis.text("attr") or "data"
        return Needs(frozenset({_frames.UPDATE}), frozenset({attr}))

    def say(self, hypothesis: Hypothesis) -> str:
        if hypothesis["mode"] == "tied":
            if hypothesis["by"] == "name":
                return f"{hypothesis['a']} and {hypothesis['b']} of {_short(hypothesis.text('model'))} are tied: equal after every step"
            return f"{hypothesis['a']} and {hypothesis['b']} that begin equal stay equal after every step"
        if hypothesis["mode"] == "synced":
            return "a parameter whose gradient is identical on all ranks has an identical value on them, too"
        what = {"grad": "gradient", "data": "value"}[hypothesis.text("attr")]
        who = f"buffer {hypothesis['owner']}" if hypothesis["role"] == "buffer" else "parameter"
        ranks = {
            "all": f"all ranks ({_PARALLEL.get(hypothesis.text('model_start'), '')})",
            "twins": "ranks whose models begin equal",
        }.get(hypothesis.text("among"), f"ranks that differ on the mesh axis {hypothesis['among']} alone")
        wrapped = f" of a model in {hypothesis['sharding']}" if hypothesis["sharding"] != _NONE else ""
        return f"the {what} of a {who}{wrapped} is identical on {ranks}, after every step"

    def detail(self, trace: Trace, hypothesis: Hypothesis, example: Mapping[str, Any]) -> Detail:
        if hypothesis["mode"] == "tied":
            return _tied_detail(example)
        attr, name, ranks = hypothesis.text("attr"), example["_name"], example["_ranks"]
        groups: dict[int, list[int]] = {}
        for rank, fp in zip(ranks, example["_fps"], strict=True):
            groups.setdefault(fp, []).append(rank)
        norms = dict(zip(ranks, example["_norms"], strict=True))
        sides = [f"rank {_listed(g)} (norm {norms[g[0]]:.9g})" for g in sorted(groups.values(), key=len)[:4]]
        label = f"{name}.grad" if attr == "grad" else name
        return Detail(
            expected=f"{label} identical on ranks {_listed(ranks)}",
            seen=f"{len(groups)} different values after step {example['step']}: {' against '.join(sides)}",
            function="torch.Tensor.backward" if attr == "grad" else _frames.UPDATE,
            variable=label,
            module=example["_owner"],
            sides=tuple(tuple(g) for g in sorted(groups.values(), key=len)),
            advice=(
                "The replicas did not begin equal, or one was changed alone: look for a broadcast of the initial or "
                "loaded state that is missing, and for seeds that differ between ranks."
                if hypothesis["mode"] == "synced"
                else "Look for a gradient all_reduce that is missing for this parameter, or that one rank skips "
                "(forward not through DDP, no_sync, a filter on a parameter attribute)."
                if attr == "grad"
                else "If its gradient differs too, look at gradient synchronisation (DDP forward bypassed, missing "
                "all_reduce); if not, at what differs between ranks from there to the update: clipping, loss scale, "
                "learning rate, optimizer state."
            ),
        )


def _listed(ranks: Sequence[int]) -> str:
    """`0, 1`, `0–16, 18–63`: three in a row and more are folded, so that 64 ranks fit into a line."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ", ".join(parts[:12]) + (", …" if len(parts) > 12 else "")


# -- ranks -----------------------------------------------------------------------------------------------------------


def _replicas(trace: Trace, among: str) -> pl.DataFrame:
    return _frames.memo(trace, f"replicas {among}", lambda t: _compare_ranks(t, among))


def _compare_ranks(trace: Trace, among: str) -> pl.DataFrame:
    """One row a variable and step in which some rank's value changed: passed if all ranks have the same."""
    procs = _frames.replicated_runs(trace)
    owned = _frames.owned(trace).filter(pl.col("role").is_in(["parameter", "buffer"]))
    columns = ["run", "proc", "rank", "lossy", "var", "step", "fp", "flags", "meta", "norm", "seq"]
    values = pl.concat([_held_data(trace).select(columns), _whole_gradients(trace).select(columns)])
    values = values.join(owned.select("var", "model", "name"), on="var")
    key = ["run", "var", "step"]
    facts = _facts(trace, procs)
    if among == "twins":
        # Where all ranks begin equal the rule on all ranks says it already.
        clones = facts.filter(pl.col("model_start") != "equal").select("proc", "model", "clone").unique()
        values = values.join(clones, on=["proc", "model"])
        key = [*key, "clone"]
    elif among != "all":
        unlike = facts.filter(pl.col("model_start") != "equal").select("proc", "model").unique()
        values = values.join(unlike, on=["proc", "model"]).join(_along(trace, among), on="proc")
        key = [*key, "line"]
    values = values.sort("step", "var", "rank")
    found = values.group_by(key, maintain_order=True).agg(
        pl.len().alias("_n"),
        (pl.col("fp").n_unique() == 1).alias("passed"),
        pl.col("lossy").any().alias("_lossy"),
        pl.col("proc", "seq").first(),
        pl.col("rank").alias("_ranks"),
        pl.col("fp").alias("_fps"),
        pl.col("norm").alias("_norms"),
        pl.col("meta").unique().sort().alias("_metas"),
    )
    found = found.filter(pl.col("_n") > 1).with_columns(
        # A rank that lost records may hold an older value than we think.
        pl.when(pl.col("passed") | ~pl.col("_lossy")).then("passed").alias("passed")
    )
    found = _thin(trace, found, ["run", "var"])
    about = owned.select("var", "model", "name", "attr", "role", "module", "kind", "position")
    found = found.join(about, on="var", maintain_order="left")
    per_variable = facts.select("run", "model", "name", "start", "model_start", "structure", "p2p").unique(["run", "model", "name"])
    found = found.join(per_variable, on=["run", "model", "name"], how="left", maintain_order="left")
    found = found.join(_averaging(trace, procs), on="run", how="left", maintain_order="left")
    found = found.join(_meta_fields(trace, found["_metas"]), on="_metas", how="left", maintain_order="left")
    if among not in ("all", "twins"):  # however the models begin
        found = found.with_columns(pl.lit(_MESH).alias("model_start"))
    buffer = pl.col("role") == "buffer"
    return found.with_columns(
        # Batch statistics and counters have little in common: a rule for each kind of buffer.
        pl.when(buffer).then(pl.concat_str("module", pl.lit("."), "kind")).otherwise(pl.lit("")).alias("owner"),
        # Updates make replicas equal whoever wraps the model; gradients are equal where they are what is synchronised.
        pl.when((pl.col("attr") == "grad") | pl.col("wrapper").str.starts_with("fsdp")).then("wrapper").otherwise(pl.lit(_NONE)).alias("sharding"),
        pl.col("name").alias("_name"),
        pl.col("module").alias("_owner"),
        pl.lit(0, dtype=pl.UInt32).alias("site"),
    )


def _axes(trace: Trace) -> list[str]:
    """Names of the mesh axes along which there are several lines of ranks in some run."""
    return sorted({axis for p in trace.processes if len(p.coords) > 1 for axis in p.coords})


def _along(trace: Trace, axis: str) -> pl.DataFrame:
    """Which ranks differ in their coordinate on this axis alone: proc, line."""
    rows = [
        (i, json.dumps([p.run, sorted((k, v) for k, v in p.coords.items() if k != axis)]))
        for i, p in enumerate(trace.processes)
        if len(p.coords) > 1 and axis in p.coords
    ]
    return pl.DataFrame(rows, schema={"proc": pl.UInt16, "line": pl.String}, orient="row")


def _synchronised(trace: Trace) -> pl.DataFrame:
    """One row a parameter and step in which all ranks use the same gradient: passed if all have the same value."""
    return _frames.memo(trace, "synchronised", _find_synchronised)


def _find_synchronised(trace: Trace) -> pl.DataFrame:
    procs = _frames.replicated_runs(trace)
    owned = _frames.owned(trace).filter(pl.col("role") == "parameter").select("var", "model", "name", "module", "kind", "position")
    key = ["run", "model", "name", "step"]
    flat = _frames.has(int(StateFlag.NONE | StateFlag.ZERO | StateFlag.CONSTANT | StateFlag.NONFINITE))
    grads = _frames.used_gradients(trace).join(procs, on="proc").join(owned, on="var")
    grads = grads.group_by(*key, "world").agg(pl.len().alias("_n"), pl.col("fp").n_unique().alias("_values"), flat.any().alias("_flat"))
    same = grads.filter((pl.col("_n") == pl.col("world")) & (pl.col("_values") == 1) & ~pl.col("_flat")).select(key)
    held = _held_data(trace).join(owned, on="var").join(same, on=key, how="semi").sort("step", "var", "rank")
    found = held.group_by([*key, "var", "module", "kind", "position"], maintain_order=True).agg(
        pl.len().alias("_n"),
        (pl.col("fp").n_unique() == 1).alias("passed"),
        pl.col("lossy").any().alias("_lossy"),
        pl.col("proc", "seq").first(),
        pl.col("rank").alias("_ranks"),
        pl.col("fp").alias("_fps"),
        pl.col("norm").alias("_norms"),
    )
    found = found.filter(pl.col("_n") > 1).with_columns(pl.when(pl.col("passed") | ~pl.col("_lossy")).then("passed").alias("passed"))
    found = _thin(trace, found, ["run", "var"]).drop("_n", "_lossy", "model", "var", "run")
    return found.with_columns(
        pl.col("name").alias("_name"), pl.col("module").alias("_owner"), pl.lit(0, dtype=pl.UInt32).alias("site")
    ).drop("name")


def _whole_gradients(trace: Trace) -> pl.DataFrame:
    """Gradients that updates used on ranks of several, of steps that are whole."""
    used = _frames.used_gradients(trace).join(_frames.replicated_runs(trace), on="proc")
    return used.join(_frames.whole_steps(trace), on=["proc", "step"], how="semi")


def _held_data(trace: Trace) -> pl.DataFrame:
    return _frames.memo(trace, "held data", _filled)


def _filled(trace: Trace) -> pl.DataFrame:
    """Values of all ranks at each step in which one changed; where a rank has no row, its last value still holds.

    Columns: run, rank, lossy, proc, var, step, fp, flags, meta, norm, seq.
    """
    procs = _frames.replicated_runs(trace)
    values = _frames.data_by_step(trace).filter(~_frames.has(int(StateFlag.NONE))).join(procs, on="proc")
    values = values.sort("proc", "var", "step")
    run, proc, var, step = (values[c].to_numpy().astype(np.int64) for c in ("run", "proc", "var", "step"))
    changed = values["changed"].to_numpy() & (step >= 0)
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
    found: pl.DataFrame = values[at[kept]].drop("step", "changed", "call", "world", "p2p")
    return found.with_columns(pl.Series("step", when[kept], dtype=pl.Int32))


def _facts(trace: Trace, procs: pl.DataFrame) -> pl.DataFrame:
    """What is known of a variable on the ranks of a run: proc, run, model, name, start, model_start, structure, clone, p2p."""
    return _frames.memo(trace, "rank facts", lambda t: _collect_facts(t, procs))


def _collect_facts(trace: Trace, procs: pl.DataFrame) -> pl.DataFrame:
    first = _frames.first_values(trace)
    return _frames.settled(trace, "rank facts", [first, procs], lambda: _facts_of(trace, first, procs))


def _facts_of(trace: Trace, first: pl.DataFrame, procs: pl.DataFrame) -> pl.DataFrame:
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
        *ranks,
        "structure",
        "clone",
        pl.when((pl.col("_equal") | (pl.col("role") != "parameter")).all().over("run", "model", "_path")).then(pl.lit("equal")).otherwise(pl.lit("different")).alias("start"),
        pl.when("_all").then(pl.lit("equal")).when("_any").then(pl.lit("mixed")).otherwise(pl.lit("different")).alias("model_start"),
        pl.when("p2p").then(pl.lit("true")).otherwise(pl.lit("false")).alias("p2p"),
    )


def _averaging(trace: Trace, procs: pl.DataFrame) -> pl.DataFrame:
    """Whether ranks drift apart and are brought together again outside the optimizer (local SGD): run, averaging.

    Replicas of such a program differ in between, on purpose.
    """
    return _frames.memo(trace, "averaging", lambda t: _find_averaging(t, procs))


def _find_averaging(trace: Trace, procs: pl.DataFrame) -> pl.DataFrame:
    about = _frames.owned(trace).filter((pl.col("role") == "parameter") & (pl.col("attr") == "data"))["var"].to_numpy()
    rows, updates = _frames.rows(trace), _frames.updates(trace)
    mine = np.isin(rows["var"].to_numpy(), about) & np.isin(rows["proc"].to_numpy(), procs["proc"].to_numpy())
    called, ran = (frame["proc"].to_numpy().astype(np.int64) << 32 | frame[c].to_numpy() for frame, c in ((rows, "call"), (updates, "seq")))
    written = mine & rows["fresh"].to_numpy() & (rows["step"].fill_null(-1).to_numpy() >= 0) & ~np.isin(called, ran)
    runs: set[int] = set()
    if written.any():
        own = rows.filter(pl.Series(mine)).with_columns(pl.col("fp").shift(1).over("proc", "var").alias("_before"))
        own = own.filter(pl.Series(written[mine])).join(procs.select("proc", "run", "world"), on="proc")
        together = own.group_by("run", "var", "step").agg(
            (pl.col("proc").n_unique() == pl.col("world").first()) & (pl.col("fp").n_unique() == 1) & (pl.col("_before").n_unique() > 1)
        )
        runs = set(together.filter(pl.col("proc"))["run"])
    said = [(run, "outside the optimizer" if run in runs else _NONE) for run in procs["run"].unique()]
    return pl.DataFrame(said, schema={"run": pl.UInt16, "averaging": pl.String}, orient="row")


def _meta_fields(trace: Trace, lists: pl.Series) -> pl.DataFrame:
    """Fields of each distinct set of meta codes: what all ranks' metas say of the parameter."""
    sets = lists.unique()
    attributes = [c for c in trace.metas.columns if c.startswith("attr.")]
    said = _frames.metas(trace, *attributes, *_SAID, "shape")
    table = {row["meta"]: row for row in said.iter_rows(named=True)}
    out: dict[str, list[Any]] = {c: [] for c in ("_metas", "marks", "shapes", *attributes, *_SAID)}
    pairs: dict[str, list[bool]] = {c + AGREE: [] for c in (*attributes, *_SAID)}
    for codes in sets.to_list():
        found = [table[c] for c in codes]
        out["_metas"].append(codes)
        for column in (*attributes, *_SAID):
            values = {row[column] for row in found}
            if column in ("wrapper", "placement"):
                values = {v or _NONE for v in values}
            out[column].append(next(iter(values)) if len(values) == 1 else None)
            pairs[column + AGREE].append(len(values) == 1)
        marks = sorted({word for row in found for word in _frames.marks(row)})
        out["marks"].append(",".join(marks) or _NONE)
        out["shapes"].append("equal" if len({row["shape"] for row in found}) == 1 else "different")
    schema: dict[str, Any] = {"_metas": lists.dtype} | {c: pl.String for c in out if c != "_metas"} | {c: pl.Boolean for c in pairs}
    return pl.DataFrame({**out, **pairs}, schema=schema)


# -- tied ------------------------------------------------------------------------------------------------------------


def _equal_roles(trace: Trace) -> pl.DataFrame:
    return _frames.memo(trace, "equal roles", _find_equal_roles)


def _find_equal_roles(trace: Trace) -> pl.DataFrame:
    """Pairs of parameters of one model that begin equal and have different roles, followed step by step."""
    about = trace.variables.filter((pl.col("role") == "parameter") & (pl.col("model") != "")).select("var", "model", "name", "module", "kind")
    about = about.with_columns(pl.concat_str("module", pl.lit("."), "kind").alias("slot"))
    first = _frames.first_values(trace).filter(~_frames.has(int(StateFlag.CONSTANT | StateFlag.ZERO | StateFlag.NONE)))
    first = first.join(about, on="var").join(_frames.metas(trace, "shape", "dtype"), on="meta", how="left")
    same = ["proc", "model", "fp", "shape", "dtype"]
    first = first.filter(pl.len().over(same) > 1).sort("slot", "name")
    # Each with the first of its group: a group of n equal parameters has n - 1 ties, not n².
    heads = first.group_by(same, maintain_order=True).agg(pl.col("var", "slot").first().name.prefix("_head_"))
    pairs = first.join(heads, on=same).filter(pl.col("slot") != pl.col("_head_slot"))
    pairs = pairs.select("proc", pl.col("_head_var").alias("va"), pl.col("var").alias("vb"), pl.col("_head_slot").alias("a"), pl.col("slot").alias("b"))
    return _follow(trace, pairs)


def _named_pairs(trace: Trace, hypotheses: pl.DataFrame) -> pl.DataFrame:
    """Pairs of parameters with the names of known ties, in each process that has both."""
    names = trace.variables.filter((pl.col("role") == "parameter") & (pl.col("attr") == "data")).select("var", "model", "name", "alias")
    held = _frames.data_by_step(trace).select("proc", "var").unique().join(names.drop("alias"), on="var")
    wanted = hypotheses.select("hyp", "model", "a", "b")
    pairs = (
        wanted.join(held.rename({"name": "a", "var": "va"}), on=["model", "a"])
        .join(held.rename({"name": "b", "var": "vb"}), on=["model", "b", "proc"])
        .drop("a", "b", "model")
    )
    found = _follow(trace, pairs)
    # Names of a script's own classes (__main__.Net, fc.weight) mean something in that kind of program only.
    own = found["_model"].str.starts_with("__main__.")
    families = trace.families
    found = found.join(families, on="proc", how="left", maintain_order="left")
    return found.with_columns(pl.when(own).then("family").alias("family"))


def _follow(trace: Trace, pairs: pl.DataFrame) -> pl.DataFrame:
    """Compare pairs (proc, va, vb, …) after each step in which one of the two changed."""
    values = _frames.data_by_step(trace)
    whole = _frames.whole_steps(trace).filter(pl.col("step") >= 0)
    pairs = pairs.unique(maintain_order=True).with_row_index("pair")
    sides = []
    for side in ("va", "vb"):
        mine = values.rename({"var": side}).join(pairs.select("proc", side, "pair"), on=["proc", side])
        sides.append(mine.select("pair", "proc", "step", "fp", "meta", "seq", "changed"))
    events = pl.concat(sides).filter("changed").group_by("pair", "proc", "step").agg(pl.col("seq").max())
    events = events.join(whole, on=["proc", "step"], how="semi").sort("step", "pair")
    for side, mine in zip("ab", sides, strict=True):
        mine = mine.select("pair", "step", pl.col("fp").alias(f"_fp_{side}"), pl.col("meta").alias(f"_meta_{side}")).sort("step")
        events = events.join_asof(mine, on="step", by="pair", strategy="backward", check_sortedness=False)
    told = _frames.metas(trace, "shape", *_SAID)
    events = events.drop_nulls(["_fp_a", "_fp_b"]).join(pairs.drop("proc"), on="pair", maintain_order="left")
    events = events.join(told.rename({"meta": "_meta_a"}), on="_meta_a", how="left", maintain_order="left").join(
        told.select(pl.col("meta").alias("_meta_b"), pl.col("shape").alias("_shape_b")), on="_meta_b", how="left", maintain_order="left"
    )
    lossy = [i for i, p in enumerate(trace.processes) if p.dropped > 0]
    equal = pl.col("_fp_a") == pl.col("_fp_b")
    events = events.filter(pl.col("shape") == pl.col("_shape_b")).with_columns(
        pl.when(equal | ~pl.col("proc").is_in(lossy)).then(equal).alias("passed"),
    ).drop("placement")  # a tie has nothing to do with it
    events = _thin(trace, events, ["pair", "proc"])
    names = trace.variables.select("var", "name", "model")
    return events.join(
        names.select(pl.col("var").alias("va"), pl.col("name").alias("_name_a"), pl.col("model").alias("_model")), on="va", maintain_order="left"
    ).join(
        names.select(pl.col("var").alias("vb"), pl.col("name").alias("_name_b")), on="vb", maintain_order="left"
    ).with_columns(pl.lit(0, dtype=pl.UInt32).alias("site"))


def _tied_detail(example: Mapping[str, Any]) -> Detail:
    a, b, model = example["_name_a"], example["_name_b"], _short(example["_model"])
    return Detail(
        expected=f"{a} and {b} equal: they are tied",
        seen=f"{a} and {b} have different values after step {example['step']}, so they are two parameters",
        function=_frames.UPDATE,
        variable=a if b in a else f"{a}, {b}",
        module=example["_model"],
        advice=f"Tie them again after whatever replaced one of them (resize of embeddings, load, copy, wrapping): {model}.tie_weights or the assignment that ties them.",
    )


# -- frames ----------------------------------------------------------------------------------------------------------


def _thin(trace: Trace, found: pl.DataFrame, by: list[str]) -> pl.DataFrame:
    """All failing examples, and the first passing ones of each."""
    passed = pl.col("passed").fill_null(value=False)
    return found.filter(~passed | (passed.cum_sum().over(*by, _frames.news(trace)) <= _KEEP))


def _stack(parts: Sequence[pl.DataFrame], fields: Sequence[str]) -> pl.DataFrame:
    types: dict[str, Any] = {"hyp": pl.UInt32, "passed": pl.Boolean, "proc": pl.UInt16, "step": pl.Int32, "seq": pl.UInt32, "site": pl.UInt32}
    frame = pl.concat(parts, how="diagonal") if parts else pl.DataFrame()
    missing = [pl.lit(None, dtype=types.get(c, pl.String)).alias(c) for c in (*types, *fields) if c not in frame.columns]
    frame = frame.with_columns(missing)
    # A scope field that a kind of example does not have is unknown there, not unset.
    frame = frame.with_columns(
        pl.when(pl.col(f).is_not_null()).then(pl.lit(value=True)).alias(f + AGREE)
        for f in _SCOPE
        if f + AGREE not in frame.columns
    )
    private = [c for c in frame.columns if c.startswith("_") and c not in ("_n", "_lossy", "_metas", "_meta_a", "_meta_b", "_shape_b")]
    agree = [f + AGREE for f in fields if f + AGREE in frame.columns]
    return frame.select(*(pl.col(c).cast(t) for c, t in types.items()), *fields, *agree, *private)


def _short(name: str) -> str:
    return name.removeprefix("__main__.")
