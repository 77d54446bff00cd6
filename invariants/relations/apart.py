"""Parts of one tensor are not copies of each other: a weight that is cut over ranks does not begin with one block, repeated.

A DTensor on a CPU draws every part with the rank's own generator, so ranks of one seed get the same block (358 of 360 cases,
findings on random numbers): a weight [B; B; …] of a rank that is lower than its shape, which trains and ends worse. The same
happens to hand-written tensor parallelism without an offset of the seed.

`mode="model"`: of the cut parameters of a model that are not constant at least one has parts that differ. `mode="parameter"`: the
parts of each do; experts that begin as copies of one, and heads that are repeated on purpose, break it, so it is a choice. What
a part is, placements tell (or Megatron's marks with the mesh); ranks that hold the same part are replicas (`consistent`).
Source: ours.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import polars as pl

from proctor.invariants.invariant import Hypothesis, Standing
from proctor.invariants.relations import Detail, Examples, Needs, Reads, Relation, register
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views import sightings as _sightings
from proctor.invariants.relations.views.absence import alone, whole
from proctor.invariants.schema import StateFlag
from proctor.invariants.trace import Trace

_FLAT: Final = int(StateFlag.NONE | StateFlag.ZERO | StateFlag.CONSTANT | StateFlag.UNHASHED)
_FEWEST: Final = 64  # elements of the whole: parts of fewer may be equal by chance, or be a table of a few numbers
_WHATS: Final = {"model": "cut parameters of a model", "parameter": "parts of a parameter"}
_SAYS: Final = {
    "model": "parameters that are cut over ranks do not all begin as one block, repeated on every rank",
    "parameter": "the parts of a parameter that is cut over ranks begin different from each other",
}


@register
class Apart(Relation):
    """Parts of a cut parameter differ."""

    name = "apart"
    code = "PR122"
    upstream: ClassVar[int] = 1
    ahead: ClassVar[int] = 0
    reads: ClassVar[Reads] = "records"

    def propose(self, trace: Trace) -> list[Hypothesis]:
        held = _every(trace).filter("passed")["mode"].unique().to_list()
        return [Hypothesis.of(self.name, mode=mode, what=_WHATS[mode]) for mode in sorted(held)]

    def idle(self, trace: Trace) -> bool:
        return alone(trace) or whole(trace)

    def examples(self, trace: Trace, hypotheses: Sequence[Hypothesis]) -> Examples:
        return Examples(_sightings.bound_examples(trace, _every(trace), hypotheses).frame.drop("family"), ())

    def standing_of(self, hypothesis: Hypothesis) -> Standing:
        """That single parameters begin as copies may be meant."""
        return Standing.LAW if hypothesis["mode"] == "model" else Standing.CHOICE

    def needs(self, hypothesis: Hypothesis) -> Needs:
        return Needs(frozenset({_frames.UPDATE}), frozenset({"data"}))

    def say(self, hypothesis: Hypothesis) -> str:
        return _SAYS[hypothesis.text("mode")]

    def detail(self, trace: Trace, hypothesis: Hypothesis, example: Mapping[str, Any]) -> Detail:
        return Detail(
            expected=example["_expected"] or "",
            seen=example["_seen"] or "",
            variable=example["_variable"] or "",
            advice="Ranks drew their parts with the same random state. Initialise the whole parameter before it is cut, give every rank of the "
            "axis a seed of its own, or let proctor.parallelize draw what one device draws.",
        )


def _every(trace: Trace) -> pl.DataFrame:
    return _sightings.of_parts(trace, "apart", {"model": _models, "parameter": _parameters})


def _parameters(trace: Trace) -> pl.DataFrame:
    """One example a parameter and rank that holds a part: passed if no two of its parts are equal."""
    cut = _sightings.thin(_cut(trace).explode("proc"), ["proc"])
    return _sightings.example(
        cut, mode="parameter", what=_WHATS["parameter"], _variable=pl.col("name"), _expected=pl.lit("parts that differ from each other"),
        _seen=pl.concat_str(pl.col("_parts"), pl.lit(" parts, "), pl.col("_values"), pl.lit(" different: ranks "), pl.col("_ranks"), pl.lit(" hold the same numbers")),
    )  # fmt: skip


def _models(trace: Trace) -> pl.DataFrame:
    """One example a model and rank that holds parts: passed if the parts of some parameter differ."""
    of = ["run", "model"]
    copied, unsure = (pl.col("_values") == 1).all().over(of), pl.col("passed").is_null().any().over(of)
    verdict = pl.when(~copied).then(pl.lit(value=True)).when(unsure).then(None).otherwise(pl.lit(value=False))
    cut = _cut(trace).with_columns(verdict.alias("passed"), pl.len().over(of).alias("_n"))
    found = cut.explode("proc").unique([*of, "proc"], keep="first", maintain_order=True)
    return _sightings.example(
        found, mode="model", what=_WHATS["model"], _variable=pl.col("name"), _expected=pl.lit("parts of a cut parameter that differ from each other"),
        _seen=pl.concat_str(pl.lit("all parts are equal in each of "), pl.col("_n"), pl.lit(" cut parameters, such as "), pl.col("name"), pl.lit(" on ranks "), pl.col("_ranks")),
    )  # fmt: skip


def _cut(trace: Trace) -> pl.DataFrame:
    return _frames.memo(trace, "cut parameters", _find_cut)


def _find_cut(trace: Trace) -> pl.DataFrame:
    """One row a parameter of which a run holds several parts when training begins that are not constant.

    run, model, name, proc (a list: who holds parts), step, passed, _parts (how many), _values (how many different ones), _ranks (that hold one that is not alone).
    """
    readable = ((pl.col("flags") & _FLAT) == 0) & (pl.col("fp") != 0)  # a part without elements has the fingerprint 0
    first = _frames.first_values(trace).filter(readable).join(_frames.replicated_runs(trace), on="proc")
    first = first.join(_frames.owned(trace).filter(pl.col("role") == "parameter").select("var", "model", "name"), on="var")
    coords = [str(p.coords["tp"]) if "tp" in p.coords else None for p in trace.processes]
    marked = pl.col("attr.tensor_model_parallel").cast(pl.String).str.to_lowercase() == "true"
    metas = _frames.metas(trace, "part", "placement", "shape", "attr.tensor_model_parallel")
    metas = metas.with_columns(pl.col("placement").str.contains("Shard").alias("_sharded"), (marked & pl.col("placement").is_null()).alias("_marked"))
    metas = metas.filter(pl.col("_sharded") | pl.col("_marked")).with_columns(pl.col("shape").map_elements(_elements, return_dtype=pl.Int64).alias("_size"))
    first = first.join(metas, on="meta")
    tp = pl.Series("_tp", coords, dtype=pl.String)[first["proc"]]
    first = first.with_columns(pl.when("_sharded").then("part").otherwise(tp).alias("_part"))
    held = ["run", "model", "name"]
    parts = first.filter(pl.col("_part").is_not_null() & (pl.col("_part") != "")).sort(*held, "rank")
    found = parts.group_by(held, maintain_order=True).agg(
        pl.col("_part").n_unique().alias("_parts"), pl.col("fp").n_unique().alias("_values"), pl.struct("_part", "fp").n_unique().alias("_pairs"),
        pl.col("_size").max(), pl.col("lossy").any().alias("_lossy"), pl.col("proc"),
        pl.col("rank").filter(pl.col("fp").is_duplicated()).unique().sort().cast(pl.String).str.join(", ").alias("_ranks"),
    )  # fmt: skip
    # One part with two values is a replica that parted: which of them is to be compared is not known.
    told = (pl.col("_parts") > 1) & (pl.col("_pairs") == pl.col("_parts")) & (pl.col("_size") >= _FEWEST)
    copies = pl.when(pl.col("_lossy")).then(None).otherwise(pl.lit(value=False))
    return found.filter(told).with_columns(
        pl.when(pl.col("_values") == pl.col("_parts")).then(pl.lit(value=True)).otherwise(copies).alias("passed"), pl.lit(0, dtype=pl.Int32).alias("step")
    )


def _elements(shape: str) -> int:
    return math.prod(json.loads(shape))
