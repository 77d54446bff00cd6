"""What is computed again for a gradient is what was computed first: activation checkpointing changes no number.

Every result inside a checkpointed function that its second pass gives was given by a first pass of this step, or of the one
before: the same function, dtype and shape, and the same bits. Catches dropout that draws another mask
(`preserve_rng_state=False`), depth or masks drawn from Python's or numpy's generator, weights or statistics that changed between forward and backward, an autocast or
a mode that is another in the second pass.

Exact, of any program. Source: ours; torch's own check compares shapes and dtypes alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import polars as pl

from proctor.invariants.invariant import Hypothesis, Standing
from proctor.invariants.relations import Detail, Examples, Needs, Reads, Relation, register
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views import sightings as _sightings
from proctor.invariants.relations.views.absence import unseen
from proctor.invariants.schema import StateFlag, Value
from proctor.invariants.trace import Trace

_NEEDS: Final = frozenset({"torch.utils.checkpoint.checkpoint", "torch.Tensor.backward", "torch.autograd.backward", _frames.UPDATE})
_LOOKED_AT: Final = ("dropout", "dropout1d", "dropout2d", "dropout3d", "linear", "conv1d", "conv2d", "conv3d", "scaled_dot_product_attention")
_FLAT: Final = int(StateFlag.UNHASHED | StateFlag.NONE)
_FULL: Final = 512  # rows of a step; of what comes later nothing is known (`instrument/probes/recomputation.py`)
_MODE: Final = "same"
_WHAT: Final = "recomputation"


@register
class Recomputed(Relation):
    """A second pass gives what the first gave."""

    name = "recomputed"
    code = "PR115"
    upstream: ClassVar[int] = 2
    ahead: ClassVar[int] = 0
    standing: ClassVar[Standing] = Standing.LAW
    reach: ClassVar[int | None] = 1
    reads: ClassVar[Reads] = "records"
    alone: ClassVar[bool] = True

    def propose(self, trace: Trace) -> list[Hypothesis]:
        return [Hypothesis.of(self.name, mode=_MODE, what=_WHAT)] if _every(trace)["passed"].any() else []

    def idle(self, trace: Trace) -> bool:
        return unseen(trace, Value.AGAIN)

    def examples(self, trace: Trace, hypotheses: Sequence[Hypothesis]) -> Examples:
        return Examples(_sightings.bound_examples(trace, _every(trace), hypotheses).frame.drop("family"), ())

    def needs(self, hypothesis: Hypothesis) -> Needs:
        return Needs(_NEEDS | {f"torch.nn.functional.{n}" for n in _LOOKED_AT}, values=frozenset({"first", "again"}))

    def say(self, hypothesis: Hypothesis) -> str:
        return "what a checkpointed function computes again in backward is what it computed first"

    def detail(self, trace: Trace, hypothesis: Hypothesis, example: Mapping[str, Any]) -> Detail:
        return Detail(
            expected=example["_expected"] or "",
            seen=example["_seen"] or "",
            function=example["_function"] or "",
            advice="Random numbers, weights, buffers or modes are others in the second pass: leave preserve_rng_state=True, draw "
            "random choices from torch's generator or before the checkpointed function, and change nothing between forward and "
            "backward.",
        )


def _every(trace: Trace) -> pl.DataFrame:
    return _sightings.of_parts(trace, "recomputed", {"same": _same})


def _same(trace: Trace) -> pl.DataFrame:
    """One row a step of a process that computes again; passed if all of that was computed before."""
    readable = (pl.col("flags") & _FLAT) == 0
    first = _sightings.sightings(trace, Value.FIRST).filter(readable).sort("proc", "seq")
    again = _sightings.sightings(trace, Value.AGAIN).filter(readable).sort("proc", "seq")
    step, like = ["proc", "step"], ["place", "meta"]
    # A program may begin the next forward before it updates: its backward is then of a later step.
    ahead = first.with_columns(pl.col("step") + 1)
    known = pl.concat([first, ahead]).select(*step, *like, "fp").unique().with_columns(pl.lit(value=True).alias("_there"))
    kinds = first.select(*step, *like).unique().with_columns(pl.lit(value=True).alias("_kind"))
    full = first.group_by(step).agg((pl.len() >= _FULL).alias("_full"))
    both = again.join(known, on=[*step, *like, "fp"], how="left", maintain_order="left")
    both = both.join(kinds, on=[*step, *like], how="left", maintain_order="left").join(full, on=step, how="left", maintain_order="left")
    lossy = [i for i, p in enumerate(trace.processes) if p.dropped > 0]
    there, untold = pl.col("_there").fill_null(value=False), pl.col("_full").fill_null(value=True) | pl.col("proc").is_in(lossy)
    # A function that the first pass did not call with such a result at all: its row may be lost, or the pass was not seen.
    other = pl.col("_kind").fill_null(value=False) & ~there
    both = both.with_columns(other.alias("_other"), untold.alias("_untold"), there.alias("_same"))
    found = both.group_by(step, maintain_order=True).agg(
        pl.when(pl.col("_other").any()).then(pl.when(pl.col("_untold").any()).then(None).otherwise(pl.lit(value=False)))
        .when(pl.col("_same").all()).then(pl.lit(value=True)).alias("passed"),
        *(pl.col(c).sort_by(~pl.col("_other"), maintain_order=True).first() for c in ("seq", "text")),
        pl.col("_other").sum().alias("_n"), pl.len().alias("_of"), (pl.col("_other") & pl.col("text").str.contains("dropout|rand|bernoulli|normal|multinomial")).any().alias("_random"),
    )  # fmt: skip
    found = _sightings.thin(found.sort("proc", "step"), ["proc"])
    why = pl.when("_random").then(pl.lit(": other random numbers")).otherwise(pl.lit(""))
    return _sightings.example(
        _sightings.sites(trace, found), mode=_MODE, what=_WHAT, _function=pl.col("text"),
        _expected=pl.lit("the second pass returns what the first returned"),
        _seen=pl.concat_str("_n", pl.lit(" of "), "_of", pl.lit(" results of the second pass were not in the first, first that of "), "text", why),
    )  # fmt: skip
