"""In which runs a law of a step (`relations/course`, `relations/stays`) could have failed: a law that passes wherever a program has no loader shows nothing by it.

Read by `judge.py`; `table.py` counts the runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import polars as pl

from proctor.invariants.relations import stays
from proctor.invariants.relations.argument.model_modes import TRAIN
from proctor.invariants.relations.argument.tables import tables
from proctor.invariants.relations.contain.trained import held_parameters
from proctor.invariants.relations.course import clipping, groups, modes, resting, updating
from proctor.invariants.relations.fresh import batches
from proctor.invariants.relations.stays import rounding
from proctor.invariants.relations.views import frames, sightings
from proctor.invariants.schema import CallFlag, Value
from proctor.invariants.trace import Trace


def _calls(trace: Trace, *names: str) -> int:
    return trace.calls.filter(pl.col("fn").is_in([i for i, f in enumerate(trace.functions) if f in names])).height


def _updates(trace: Trace) -> bool:
    return not frames.updates(trace).drop_nulls("optimizer").group_by("proc", "optimizer").len().filter(pl.col("len") > 1).is_empty()


def _clips(trace: Trace) -> bool:
    return _calls(trace, clipping.CLIP) > 0


def _batches(trace: Trace) -> bool:
    rows = batches.batches(trace).filter(~pl.col("flat") & (pl.col("numbers") >= batches.ENOUGH))
    return _calls(trace, batches.NEXT) > 1 and rows["fp"].n_unique() > 1


def _drawn(trace: Trace) -> bool:
    return _batches(trace) and not batches.drawn(trace).is_empty()


def _restored(trace: Trace) -> bool:
    free = tables(trace)["evaluating"].filter(pl.col("step") >= 0)
    return _calls(trace, TRAIN) > 0 and not free.join(modes.chancy(trace), on=["proc", "class"], how="semi").is_empty()


def _groups(trace: Trace) -> bool:
    return not groups.decays(trace).filter((pl.col("_groups") > 1) & (pl.col("_vectors") > 1) & (pl.col("_matrices") > 1)).is_empty()


def _decays(trace: Trace) -> bool:
    return not groups.decays(trace).filter(pl.max_horizontal("_least", "_most") > 0).is_empty()


def _frozen(trace: Trace) -> bool:
    return bool(held_parameters(trace).filter(pl.col("model") != "")["frozen"].any())


def _evaluates(trace: Trace) -> bool:
    return _calls(trace, modes.EVAL) > 0


def _resumes(trace: Trace) -> bool:
    roots = trace.calls.filter(frames.has(int(CallFlag.ROOT))).height
    return _evaluates(trace) and roots > 1 and len(modes.chancy(trace)) > 0


def _targets(trace: Trace) -> bool:
    came = sightings.sightings(trace, Value.HANDED)["fp"].unique()
    return not sightings.sightings(trace, Value.JUDGED).filter((pl.col("text") == "target") & pl.col("fp").is_in(came.implode())).is_empty()


def _scores(trace: Trace) -> bool:
    return not sightings.sightings(trace, Value.JUDGED).filter(pl.col("text") == "scores").is_empty()


def _digits(trace: Trace) -> bool:
    return not sightings.sightings(trace, Value.DIGITS).filter(pl.col("number") > 0).is_empty()


def _seen(mode: str) -> Callable[[Trace], bool]:
    return lambda trace: not stays.told(trace, mode).is_empty()


def _halves(trace: Trace) -> bool:
    return any(str(trace.features[args].get("0.dtype")) in rounding.HALVES for args in frames.calls_of(trace, r"torch\.Tensor\.mul_")["args"].unique())


def _halved(trace: Trace) -> bool:
    return not held_parameters(trace).filter((pl.col("model") != "") & pl.col("dtype").is_in(list(rounding.HALVES))).is_empty()


CHANCES: Final[dict[str, Callable[[Trace], bool]]] = {
    "fed": _updates, "again": _updates, "clips": _clips, "shrinks": _clips,
    "successive": lambda trace: _calls(trace, updating.SCHEDULE) > 1, "evaluates": _evaluates, "resumes": _resumes,
    "masks": lambda trace: len(modes.chancy(trace)) > 0, "batch": _batches, "reversed": _decays, "parted": _groups, "halved": _frozen,
    **{mode: _seen(mode) for mode in stays.SAYS if mode not in ("product", "update")}, "product": _halves, "update": _halved,
    "aligned": _targets, "scored": _scores, "digits": _digits, "used": lambda trace: not resting.cleared(trace).is_empty(),
    "consumes": _drawn, "restored": _restored, "rounds": _digits,
}  # fmt: skip


def chances(trace: Trace) -> list[str]:
    """Modes of `course` and `stays` that had something in this run to fail on."""
    return sorted(mode for mode, could in CHANCES.items() if could(trace))
