"""Is every parameter of the model in what is saved? Read off the keys of mappings that `torch.save` gets."""

from __future__ import annotations

import re
from typing import Any, Final

import polars as pl

from proctor.invariants.codec.variable import unwrapped
from proctor.invariants.relations.views import calls as _calls
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.trace import Trace

SAVE: Final = "torch.save"
_ENTRY: Final = re.compile(r"(.*)\['([^']+)'\]\.dtype")
_SAVES: Final = 8  # distinct saves that are looked at, by caller
_SCHEMA: Final[dict[str, Any]] = {
    "proc": pl.UInt16, "step": pl.Int32, "seq": pl.UInt32, "site": pl.UInt32, "passed": pl.Boolean,
    "family": pl.String, "bound": pl.String, "slot": pl.String, "_name": pl.String, "_module": pl.String,
}  # fmt: skip


def saved(trace: Trace) -> pl.DataFrame:
    """One row a parameter and save of a model's state; `slot` is the caller, `bound` the family if it is the script.

    A program that saves its adapters only does so always, so a rule is of one caller: of a library's function wherever
    it is used, else of one kind of program.
    """
    return _frames.memo(trace, "saved", _find_saved)


def _find_saved(trace: Trace) -> pl.DataFrame:
    code = trace.function_code.get(SAVE)
    calls = _calls.calls_of(trace).filter(pl.col("fn") == (-1 if code is None else code))
    calls = calls.sort("proc", "seq").unique(["proc", "pfn", "args"], keep="first", maintain_order=True)
    calls = calls.filter(pl.int_range(pl.len()).over("proc", "pfn") < _SAVES)
    models = _models(trace)
    families = dict(trace.families.select("proc", "family").iter_rows())
    rows = []
    for proc, seq, args, pfn, site, step in calls.select("proc", "seq", "args", "pfn", "site", "step").iter_rows():
        for path, written in _states(trace.features[args]).items():
            keys = written | {unwrapped(key) for key in written}
            model, names = max(models.get(proc, {}).items(), key=lambda m: len(m[1] & keys), default=("", set()))
            whole = trace.features[args].get(f"{path}.len") == len(written)  # of a long mapping, not all keys are recorded
            if whole and names & keys:
                caller = trace.functions[pfn] if pfn else ""
                bound = "" if _calls.is_library(caller) else families.get(proc, "")
                rows += [
                    (proc, step, seq, site, n in keys, bound or None, bound, caller, n, model) for n in sorted(names)
                ]
    return pl.DataFrame(rows, schema=_SCHEMA, orient="row")


def _states(features: dict[str, Any]) -> dict[str, set[str]]:
    """Keys of the mappings of tensors among the arguments, by path."""
    found: dict[str, set[str]] = {}
    for path in features:
        entry = _ENTRY.fullmatch(path)
        if entry is not None:
            found.setdefault(entry[1], set()).add(entry[2])
    return found


def _models(trace: Trace) -> dict[int, dict[str, set[str]]]:
    """Names of the parameters of each process's models. A parameter with two names needs one of them."""
    known = trace.variables.filter(
        (pl.col("role") == "parameter") & (pl.col("attr") == "data") & (pl.col("model") != "") & (pl.col("alias") == "")
    )
    held = trace.states.select("proc", "var").unique().join(known, on="var")
    found: dict[int, dict[str, set[str]]] = {}
    for proc, model, name in held.select("proc", "model", "name").iter_rows():
        found.setdefault(proc, {}).setdefault(model, set()).add(name)
    return found
