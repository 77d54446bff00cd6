"""Switches of losses and of attention: words and truth values that a program's own function gives them.

`reduction="sum"` where health has a mean changes every gradient by the size of the batch, and `is_causal` decides what a model may
see. What is not given has the default that torch documents, so that to write it out changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import polars as pl

from proctor.invariants.codec.signature import Plain
from proctor.invariants.relations.views.calls import calls_of, codes_where, programs_of, text_of, texts
from proctor.invariants.trace import Trace

SCRIPT: Final = "<program>"  # the caller of what is called at the top of the script, and of all other calls of that function: see `given`
_FUNCTIONAL: Final = "torch.nn.functional."
_ATTENTION: Final = f"{_FUNCTIONAL}scaled_dot_product_attention"
_LOSSES: Final = ("_loss", "cross_entropy", "kl_div", "_with_logits")  # ends of the names of torch's losses
_CAUSAL: Final = 5  # position of `is_causal`


def given(trace: Trace) -> pl.DataFrame:
    """One row a call and switch: function, feature, caller, program, _seen, and the call; `passed` is null.

    Where only what rules need is recorded, a call inside of the user's functions looks like one at the top. So all calls of what is called there
    count for the program as a whole.
    """
    codes = codes_where(trace, lambda name: _switch(name) != "")
    calls = calls_of(trace).filter(pl.col("fn").is_in(codes))
    calls = calls.join(texts(trace.functions, "fn", "function"), on="fn", how="left", maintain_order="left")
    told = [
        (fn, args, f"{_switch(trace.functions[fn])}.value", _value(trace.functions[fn], trace.features[args]))
        for fn, args in calls.select("fn", "args").unique(maintain_order=True).iter_rows()
    ]
    said = pl.DataFrame(told, schema={"fn": pl.UInt32, "args": pl.UInt32, "feature": pl.String, "_seen": pl.String}, orient="row")
    calls = calls.join(said, on=["fn", "args"], how="inner", maintain_order="left").drop_nulls("_seen")
    callers = texts([name or SCRIPT for name in trace.functions], "pfn", "caller")
    calls = calls.join(callers, on="pfn", how="left", maintain_order="left").join(programs_of(trace).select("proc", "program"), on="proc", how="left", maintain_order="left")
    calls = calls.with_columns(pl.col("caller").fill_null(SCRIPT), pl.lit(None, pl.Boolean).alias("passed"))
    top = pl.col("caller") == SCRIPT
    others = calls.filter(~top).join(calls.filter(top).select("proc", "fn").unique(), on=["proc", "fn"], how="semi", maintain_order="left")
    return pl.concat([calls, others.with_columns(pl.lit(SCRIPT).alias("caller"))])


def _switch(function: str) -> str:
    if function == _ATTENTION:
        return "is_causal"
    return "reduction" if function.startswith(_FUNCTIONAL) and function.endswith(_LOSSES) else ""


def _value(function: str, features: Mapping[str, Plain]) -> str | None:
    """The switch as a text; `None` where what was given is no plain value."""
    name = _switch(function)
    default: Plain = False if name == "is_causal" else "mean"
    told = features.get(f"{name}.value", default)
    if name == "is_causal" and f"{_CAUSAL}.value" in features:
        told = features[f"{_CAUSAL}.value"]
    older = any(features.get(f"{old}.value") is not None for old in ("reduce", "size_average"))  # these decide instead of `reduction`
    return None if older or not isinstance(told, str | bool) else text_of(told)
