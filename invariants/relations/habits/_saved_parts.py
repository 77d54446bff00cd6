"""What a program's files hold: the names at the top of what `torch.save` is given (`relations/resumed.py`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import polars as pl

from proctor.invariants.invariant import Hypothesis
from proctor.invariants.relations.views import calls as _calls
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views import habits as _habits
from proctor.invariants.relations.views import sightings as _sightings
from proctor.invariants.relations.views.checkpoints import SAVE
from proctor.invariants.trace import Trace

MODE: Final = "parts"
_TOP: Final = re.compile(r"0\['([^'\d]+)'\]\.(?:type|value)")  # a name with a number in it counts something
_SAVES: Final = 8  # that are looked at, by caller
_LEAST: Final = 2  # parts, or there is nothing to leave out


def saves(trace: Trace) -> pl.DataFrame:
    """One row a save of a mapping of parts: proc, seq, step, site, family, caller, parts (list), whole (all of them are known)."""
    return _frames.memo(trace, "saved parts", _saves_of)


def _saves_of(trace: Trace) -> pl.DataFrame:
    calls = _calls.calls_of(trace).filter(pl.col("fn") == trace.function_code.get(SAVE, -1)).sort("proc", "seq")
    calls = calls.filter(pl.int_range(pl.len()).over("proc", "pfn", _frames.news(trace)) < _SAVES)
    rows: list[tuple[Any, ...]] = []
    for proc, seq, step, site, args, pfn in calls.select("proc", "seq", "step", "site", "args", "pfn").iter_rows():
        features = trace.features[args]
        parts = sorted({found[1] for path in features if (found := _TOP.fullmatch(path))})
        # A mapping of tensors only is a model's state, whose names are the model's.
        if len(parts) >= _LEAST and not all(f"0['{part}'].dtype" in features for part in parts):
            length = features.get("0.len")
            rows.append((proc, seq, step, site, trace.functions[pfn] if pfn else "", parts, length == len(parts)))
    schema: dict[str, Any] = {
        "proc": pl.UInt16, "seq": pl.UInt32, "step": pl.Int32, "site": pl.UInt32, "caller": pl.String, "parts": pl.List(pl.String), "whole": pl.Boolean,
    }  # fmt: skip
    return _habits.with_family(trace, pl.DataFrame(rows, schema=schema, orient="row"))


def propose(trace: Trace, relation: str) -> list[Hypothesis]:
    """What all files that a function of a process saves have in common."""
    found = {}
    for (_, caller, family), rows in saves(trace).drop_nulls("family").group_by("proc", "caller", "family", maintain_order=True):
        common = set.intersection(*map(set, rows["parts"].to_list()))
        if len(common) >= _LEAST:
            found[Hypothesis.of(relation, mode=MODE, what=f"{caller}:{','.join(sorted(common))}", family=str(family))] = True
    return list(found)


def examples(trace: Trace, hypotheses: Sequence[Hypothesis]) -> pl.DataFrame:
    """One row a rule, save by its function and part: passed if the file has the part."""
    frames = [pl.DataFrame(schema=_sightings.EXAMPLE)]
    rows = saves(trace) if any(h["mode"] == MODE for h in hypotheses) else None
    for what, family in sorted({(h.text("what"), h.text("family")) for h in hypotheses if h["mode"] == MODE}):
        assert rows is not None
        caller, _, wanted = what.partition(":")
        mine = rows.filter((pl.col("caller") == caller) & (pl.col("family") == family))
        mine = mine.with_columns(pl.lit(wanted.split(",")).alias("_part")).explode("_part")
        mine = mine.with_columns(pl.col("parts").list.contains(pl.col("_part")).alias("passed"))
        mine = mine.filter(pl.col("passed") | pl.col("whole"))  # of a long mapping not all names are recorded
        frames.append(_sightings.example(
            mine, mode=MODE, what=pl.lit(what), _function=pl.lit(SAVE), _variable=pl.col("_part"),
            _expected=pl.lit(f"a file with {wanted.replace(',', ', ')}"), _seen=pl.format("a file without {}", "_part"),
        ))  # fmt: skip
    return pl.concat(frames)
