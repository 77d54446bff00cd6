"""Habits of one kind of program: what all of its recorded runs kept, and nothing is known of other programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import polars as pl

from proctor.invariants.invariant import Hypothesis
from proctor.invariants.relations import Examples, _surveys
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views import sightings as _sightings
from proctor.invariants.trace import Trace

_KEYS: Final = ("mode", "what", "family")
_SCRIPT: Final = "script:"
_PARTS: Final = "parts:"
_NAMED: Final = 2  # parts with names of their own; one, such as `fc`, has many a program


def survey(relation: str, found: pl.DataFrame, least: int) -> pl.DataFrame:
    """The survey of a relation whose rules are habits.

    Args:
        found: examples in the form of `_sightings.EXAMPLE`, with the family.
        least: passing examples of one shard below which it says nothing for a rule.
    """
    decided = found.filter(pl.col("passed").is_not_null() & pl.col("family").is_not_null())
    told = decided.group_by(_KEYS).agg(pl.col("passed").all().alias("kept"), pl.len().alias("n"))
    seen = {Hypothesis.of(relation, mode=mode, what=what, family=family): (kept, n) for mode, what, family, kept, n in told.iter_rows()}
    held = [h for h, (kept, n) in seen.items() if not kept or n >= least]
    return _surveys.of_hypotheses(held, [h for h, (kept, _) in seen.items() if not kept])


def examples(trace: Trace, found: pl.DataFrame, hypotheses: Sequence[Hypothesis]) -> Examples:
    """Those that habits speak of; the family is in the rule, so it is no condition."""
    return Examples(_sightings.bound_examples(trace, found, hypotheses).frame.drop("family"), ())


def with_family(trace: Trace, rows: pl.DataFrame) -> pl.DataFrame:
    """Add the family; of models that are made of torch's classes alone, which unrelated programs share, with the names that the program gave their parts, or that of the script."""
    return rows.join(_frames.memo(trace, "families with names", _families), on="proc", how="left", maintain_order="left")


def _families(trace: Trace) -> pl.DataFrame:
    scripts = pl.Series([f" {_SCRIPT}{process.program}" for process in trace.processes], dtype=pl.String)
    known = trace.families.join(pl.DataFrame({"proc": pl.Series(range(len(scripts)), dtype=pl.UInt16), "_script": scripts}), on="proc", how="left", maintain_order="left")
    common = pl.col("family").str.split(" ").list.eval(pl.element().str.starts_with("torch.")).list.all()
    alone = known.filter(common)
    if alone.is_empty():
        return known.select("proc", "family")
    parameters = trace.variables.filter((pl.col("role") == "parameter") & (pl.col("attr") == "data") & (pl.col("alias") == "")).select("var", pl.col("name").str.split(".").alias("_part"))
    parameters = parameters.with_columns(pl.col("_part").list.slice(0, pl.col("_part").list.len() - 1))
    held = trace.states.select("proc", "var").unique().join(alone.select("proc"), on="proc", how="semi").join(parameters, on="var").select("proc", "_part").explode("_part")
    named = held.filter(pl.col("_part").str.contains("[A-Za-z]")).group_by("proc").agg(pl.col("_part").unique().sort())
    named = named.filter(pl.col("_part").list.len() >= _NAMED).select("proc", pl.format(" {}{}", pl.lit(_PARTS), pl.col("_part").list.join(",")).alias("_names"))
    known = known.join(named, on="proc", how="left", maintain_order="left")
    return known.select("proc", pl.when(common).then(pl.concat_str("family", pl.coalesce("_names", "_script"))).otherwise("family").alias("family"))


def of_programs(hypothesis: Hypothesis) -> str:
    """`, in programs of Net`; the end of a sentence."""
    models = sorted({word.split("/")[0].removeprefix("__main__.").removeprefix(_SCRIPT).removeprefix(_PARTS) for word in hypothesis.text("family").split()})
    return f", in programs of {', '.join(models)}" if models else ""


