"""A call contains a call, or a change of a variable, as TrainCheck means it.

The contained call ran in the same thread and returned, with at least the arguments that the rule names; the change was
seen in the same process, in any thread, from the beginning of the call to its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from proctor.invariants.invariant import Hypothesis
from proctor.invariants.relations import Detail, Needs, register
from proctor.invariants.relations.traincheck.records import Records, within
from proctor.invariants.relations.traincheck.rule import (
    TrainCheckRule,
    decoded,
    example_rows,
    short,
    with_fields,
)
from proctor.invariants.relations.traincheck.states import intervals
from proctor.invariants.relations.traincheck.tables import Record
from proctor.invariants.relations.traincheck.values import identity, matches
from proctor.invariants.trace import Trace

Times = np.ndarray[Any, Any]
Where = tuple[int, int]  # process, thread; a change is seen in all threads: -1


@register
class Contain(TrainCheckRule):
    """A call contains another call, or a change of a variable."""

    name, code = "tc_contain", "PR151"
    group = "parent_func_call_pre"
    upstream = 3

    def judge(self, seen: Records, trace: Trace, hypotheses: Sequence[Hypothesis]) -> list[pl.DataFrame]:
        out = []
        alike: dict[str, list[tuple[int, Hypothesis]]] = {}
        for hyp, h in enumerate(hypotheses):
            alike.setdefault(h.text("parent"), []).append((hyp, h))
        found: dict[tuple[Any, ...], dict[Where, Times]] = {}
        for parent, members in alike.items():
            calls = with_fields(seen, seen.calls_of(parent), [h for _, h in members])
            if calls.is_empty():
                continue
            for hyp, h in members:
                key = tuple(p for p in h.params if p[0] not in ("parent", "when"))
                if key not in found:
                    found[key] = _changes(seen, h) if h.get("type") is not None else _calls(seen, h)
                out.append(example_rows(hyp, h, calls, _holds(calls, found[key])))
        return out

    def needs(self, hypothesis: Hypothesis) -> Needs:
        return Needs(functions=frozenset({hypothesis.text("parent"), hypothesis.text("child")} - {""}))

    def say(self, hypothesis: Hypothesis) -> str:
        return f"{short(hypothesis.text('parent'))} contains {_what(hypothesis)}"

    def detail(self, trace: Trace, hypothesis: Hypothesis, example: Mapping[str, Any]) -> Detail:
        parent, what = short(hypothesis.text("parent")), _what(hypothesis)
        return Detail(
            expected=f"{what} during {parent}",
            seen=f"{parent} without it",
            function=hypothesis.text("parent"),
            variable=f"{hypothesis.text('type')}.{hypothesis.text('attr')}" if hypothesis.get("type") else "",
            advice=f"look at what {parent} was called on, and when",
        )


def _what(h: Hypothesis) -> str:
    if h.get("type") is not None:
        values = [f"{word} {h.text(key)}" for word, key in (("from", "pre"), ("to", "post")) if h.get(key) is not None]
        return " ".join([f"a change of {short(h.text('type'))}.{h.text('attr')}", *values])
    expected = decoded(h.get("arguments"))
    given = expected if isinstance(expected, dict) else {}
    plain = {k: v for k, typed in given.items() if not isinstance(v := _value(typed), (dict, list))}
    shown = ", ".join(f"{k}={str(v)[:40]}" for k, v in list(plain.items())[:4])
    ending = f" that raises {h.text('exception')}" if h.get("exception") is not None else ""
    return f"{short(h.text('child'))}({shown}){ending}"


def _value(typed: Any) -> Any:
    """The value of `{type: value}`."""
    return next(iter(typed.values()), None) if isinstance(typed, dict) else typed


def _calls(seen: Records, h: Hypothesis) -> dict[Where, Times]:
    """When each matching child began, by thread; sorted."""
    calls = seen.calls_of(h.text("child"))
    exception = h.get("exception")
    if exception is None:
        calls = calls.filter(pl.col("status") == int(Record.POST))
    else:
        raised = calls.filter(pl.col("status") == int(Record.RAISED))
        parsed = seen.parse(raised["ret"].to_list())
        calls = raised.filter(
            pl.Series([parsed[c].get("exception") == exception for c in raised["ret"].to_list()], dtype=pl.Boolean)
        )
    expected = decoded(h.get("arguments"))
    if isinstance(expected, dict) and calls.height:
        wanted = {name: identity(value) for name, value in expected.items()}
        parsed = seen.parse(calls["args"].to_list())
        fits = {c: _fits(seen.arguments(h.text("child"), parsed[c]), wanted) for c in calls["args"].unique().to_list()}
        calls = calls.filter(pl.Series([fits[c] for c in calls["args"].to_list()], dtype=pl.Boolean))
    return _by_place(calls.select("proc", "thread", pl.col("t0").alias("time")))


def _fits(given: Mapping[str, Any], wanted: Mapping[str, str | None]) -> bool:
    return all(name in given and identity(given[name]) == value for name, value in wanted.items())


def _changes(seen: Records, h: Hypothesis) -> dict[Where, Times]:
    """When each matching change was seen, by process; sorted."""
    changes = intervals(seen, h.text("type"), h.text("attr")).filter(pl.col("before").is_not_null())
    for key, column in (("pre", "before"), ("post", "value")):
        if h.get(key) is not None and changes.height:
            expected = decoded(h.get(key))
            texts = changes[column].unique().to_list()
            fitting = [t for t in texts if matches(expected, decoded(t))]
            changes = changes.filter(pl.col(column).is_in(fitting))
    return _by_place(changes.select("proc", pl.lit(-1, dtype=pl.Int64).alias("thread"), pl.col("start").alias("time")))


def _by_place(times: pl.DataFrame) -> dict[Where, Times]:
    grouped = times.sort("time").partition_by("proc", "thread", as_dict=True, maintain_order=True)
    return {(int(k[0]), int(k[1])): part["time"].to_numpy() for k, part in grouped.items()}


def _holds(calls: pl.DataFrame, found: Mapping[Where, Times]) -> Times:
    """Which of these calls contain one of these times; calls strictly, changes also at their edges."""
    proc, thread = calls["proc"].to_numpy(), calls["thread"].to_numpy()
    t0, t1 = calls["t0"].to_numpy(), calls["t1"].to_numpy()
    holds = np.zeros(calls.height, dtype=bool)
    for (p, th), times in found.items():
        edge = 1 if th < 0 else 0
        mine = (proc == p) & ((thread == th) if th >= 0 else True)
        holds[mine] |= within(times, t0[mine] - edge, t1[mine] + edge) > 0
    return holds
