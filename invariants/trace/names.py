"""Texts of a trace as columns: variables and metas, one row a code.

`Trace` and the live checker call it; a text that cannot be read gives a row without values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import polars as pl

from proctor.invariants.codec.variable import Variable, apart


def variables_frame(rows: Sequence[Variable]) -> pl.DataFrame:
    """`variables`, from what the texts say."""
    return pl.DataFrame(
        {
            "var": pl.Series(range(len(rows)), dtype=pl.UInt32),
            **{
                f: pl.Series([getattr(r, f) for r in rows], dtype=pl.String)
                for f in Variable.__struct_fields__
            },
        }
    )


def metas_frame(parsed: Sequence[Mapping[str, str]]) -> pl.DataFrame:
    """`metas`, from what the texts say."""
    keys = sorted({k for p in parsed for k in p})
    return pl.DataFrame(
        {
            "meta": pl.Series(range(len(parsed)), dtype=pl.UInt32),
            **{k: pl.Series([p.get(k) for p in parsed], dtype=pl.String) for k in keys},
        }
    )


def decode_variable(text: str) -> Variable:
    try:
        var = msgspec.json.decode(text, type=Variable)
        if "#" not in var.model:
            return var
        return msgspec.structs.replace(var, name=apart(var.model, var.name), alias=apart(var.model, var.alias))
    except msgspec.MsgspecError:
        return Variable("", "", "", "")


def flat_meta(text: str) -> dict[str, str]:
    if not text:
        return {}
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return {str(k): _plain(v) for k, v in tree.items() if v is not None} if isinstance(tree, dict) else {}


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
