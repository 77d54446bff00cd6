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

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import polars as pl

from proctor.invariants.condition import AGREE
from proctor.invariants.invariant import Hypothesis, Standing
from proctor.invariants.relations import Detail, Examples, Needs, Reads, Relation, register
from proctor.invariants.relations.consistent.replicas import KEEP, NONE, SAID, axes, replicas, synchronised
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.schema import StateFlag
from proctor.invariants.trace import Trace

_ATTRIBUTES: Final = ("attr.tensor_model_parallel", "attr.model_parallel", "attr.partition_dim", "attr.is_expert")
_SCOPE: Final = ("family", "placement", "p2p", "structure", "start", "marks", "averaging")
# What is never generalised: gradients of wrapped models say nothing of unwrapped ones, nor replicas of shards.
_BOUND: Final = ("role", "attr", "owner", "sharding", "model_start")
_PARALLEL: Final = {"equal": "whose models begin equal", "mixed": "whose models begin equal in part", "different": "whose models begin different"}


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
        for among in ("all", "twins", *axes(trace)):
            same = replicas(trace, among).filter("passed")
            for bound in same.select(_BOUND).unique().to_dicts():
                found.append(Hypothesis.of("consistent", mode="ranks", among=among, **bound))
        if synchronised(trace)["passed"].any():
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
        kinds: dict[tuple[str, str], list[int]] = {}
        for i, h in enumerate(hypotheses):
            kinds.setdefault((h.text("mode"), h.text("by") if h["mode"] == "tied" else h.text("among")), []).append(i)
        parts: list[pl.DataFrame] = []
        for (mode, way), mine in kinds.items():
            if mode == "ranks":
                parts.append(replicas(trace, way).join(_indexed(hypotheses, mine, *_BOUND), on=list(_BOUND)))
            elif mode == "synced":
                parts.append(synchronised(trace).join(_indexed(hypotheses, mine), how="cross"))
            elif way == "role":
                parts.append(_equal_roles(trace).join(_indexed(hypotheses, mine, "a", "b"), on=["a", "b"]))
            else:
                parts.append(_named_pairs(trace, _indexed(hypotheses, mine, "model", "a", "b")))
        known = [c for c in trace.metas.columns if c.startswith("attr.")]
        attributes = [c for c in _ATTRIBUTES if c in known] + sorted(set(known) - set(_ATTRIBUTES))
        fields = (*attributes, *SAID, "marks", "p2p", "structure", "start", "averaging", "shapes", "module", "kind", "position", "family")
        return Examples(_stack(parts, fields), fields, _SCOPE)

    def standing_of(self, hypothesis: Hypothesis) -> Standing:
        """Two parameters that begin equal need not be one: a head may begin as a copy of an embedding."""
        return Standing.CHOICE if hypothesis["mode"] == "tied" else Standing.REPLICAS

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
        wrapped = f" of a model in {hypothesis['sharding']}" if hypothesis["sharding"] != NONE else ""
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


def _indexed(hypotheses: Sequence[Hypothesis], mine: Sequence[int], *keys: str) -> pl.DataFrame:
    """Some hypotheses by number: hyp, and these parameters."""
    rows = [(i, *(hypotheses[i].get(k) for k in keys)) for i in mine]
    return pl.DataFrame(rows, schema={"hyp": pl.UInt32} | dict.fromkeys(keys, pl.String), orient="row")


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
    told = _frames.metas(trace, "shape", *SAID)
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
    return found.filter(~passed | (passed.cum_sum().over(*by, _frames.news(trace)) <= KEEP))


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
    private = [c for c in frame.columns if c.startswith("_") and c not in ("_meta_a", "_meta_b", "_shape_b")]
    agree = [f + AGREE for f in fields if f + AGREE in frame.columns]
    return frame.select(*(pl.col(c).cast(t) for c, t in types.items()), *fields, *agree, *private)


def _short(name: str) -> str:
    return name.removeprefix("__main__.")
