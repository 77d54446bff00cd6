"""Calls in order, as TrainCheck means it: one function before each call of another, or after it.

Cover: between two calls of the second function, the first has begun and ended. Lead: between two calls of the first
function, the second has. Both look at one thread at a time, at the calls that meet the precondition, and only where
the two functions are not always nested; a function that is called over and over is not looked at. TrainCheck leaves
out some functions by name when it infers; a rule that names one is checked here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Final

import numpy as np
import polars as pl

from proctor.invariants.invariant import Hypothesis
from proctor.invariants.relations import Detail, Needs, register
from proctor.invariants.relations.traincheck.records import MAX_CONSECUTIVE, Records
from proctor.invariants.relations.traincheck.rule import (
    TrainCheckRule,
    decoded,
    example_rows,
    met,
    short,
    with_fields,
)
from proctor.invariants.trace import Trace

_NEVER: Final = np.iinfo(np.int64).max

Thread = tuple[int, int]  # process, thread
Times = np.ndarray[Any, Any]


class _Order(TrainCheckRule):
    """Two or more functions, each pair of neighbours in order."""

    upstream = 4
    anchor: ClassVar[int]  # which function of a pair the precondition speaks of, and every call of which is judged

    def judge(self, seen: Records, trace: Trace, hypotheses: Sequence[Hypothesis]) -> list[pl.DataFrame]:
        threads = _threads(seen)
        out = []
        alike: dict[str, list[tuple[int, Hypothesis, str]]] = {}
        for hyp, h in enumerate(hypotheses):
            for pair in pairwise(functions_of(h)):
                alike.setdefault(pair[self.anchor], []).append((hyp, h, pair[1 - self.anchor]))
        for function, members in alike.items():
            calls = with_fields(seen, seen.calls_of(function), [h for _, h, _ in members])
            by_thread = {
                (int(k[0]), int(k[1])): part
                for k, part in calls.partition_by("proc", "thread", as_dict=True, maintain_order=True).items()
            }
            for hyp, h, other in members:
                for where, mine in by_thread.items():
                    thread = threads.get(where)
                    judged = met(mine, h)
                    if thread is None or judged.is_empty() or not thread.beside_any(function):
                        continue
                    if thread.beside(function, other):
                        theirs = seen.calls_of(other).filter((pl.col("proc") == where[0]) & (pl.col("thread") == where[1]))
                        judged, passed = self.in_order(judged, theirs["t0"].to_numpy(), theirs["t1"].to_numpy())
                    else:
                        passed = np.zeros(judged.height, dtype=bool)
                    out.append(example_rows(hyp, h, judged, passed))
        return out

    def in_order(self, judged: pl.DataFrame, begun: Times, ended: Times) -> tuple[pl.DataFrame, Times]:
        """Calls that can be judged, and whether the other function was called where it should be."""
        raise NotImplementedError

    def needs(self, hypothesis: Hypothesis) -> Needs:
        return Needs(functions=frozenset(functions_of(hypothesis)))


@register
class Cover(_Order):
    """Every call of a function has one of another before it."""

    name, code = "tc_cover", "PR152"
    group = "func_cover"
    anchor = 1

    def in_order(self, judged: pl.DataFrame, begun: Times, ended: Times) -> tuple[pl.DataFrame, Times]:
        start, end = judged["t0"].to_numpy(), judged["t1"].to_numpy()
        since = np.concatenate([[-1], end[:-1]])
        apart = np.concatenate([[True], start[1:] > end[:-1]])
        return judged, apart & _one_between(begun, ended, since, start)

    def say(self, hypothesis: Hypothesis) -> str:
        names = [short(n) for n in functions_of(hypothesis)]
        return " and ".join(f"{b} is called only after {a} since its last call" for a, b in pairwise(names))

    def detail(self, trace: Trace, hypothesis: Hypothesis, example: Mapping[str, Any]) -> Detail:
        names = [short(n) for n in functions_of(hypothesis)]
        return Detail(
            expected=f"{', '.join(names[:-1])} before each call of {names[-1]}",
            seen=f"{names[-1]} was called without {', '.join(names[:-1])} before it",
            function=functions_of(hypothesis)[-1],
            advice=f"look for a path that reaches {names[-1]} without {names[0]}",
        )


@register
class Lead(_Order):
    """Every call of a function but the last has one of another after it."""

    name, code = "tc_lead", "PR153"
    group = "func_lead"
    anchor = 0

    def in_order(self, judged: pl.DataFrame, begun: Times, ended: Times) -> tuple[pl.DataFrame, Times]:
        if judged.height == 1:
            return judged, np.ones(1, dtype=bool)
        start, end = judged["t0"].to_numpy()[1:], judged["t1"].to_numpy()[:-1]
        return judged.head(judged.height - 1), (start > end) & _one_between(begun, ended, end, start)

    def say(self, hypothesis: Hypothesis) -> str:
        names = [short(n) for n in functions_of(hypothesis)]
        return " and ".join(f"after {a}, {b} is called before {a} is called again" for a, b in pairwise(names))

    def detail(self, trace: Trace, hypothesis: Hypothesis, example: Mapping[str, Any]) -> Detail:
        names = [short(n) for n in functions_of(hypothesis)]
        return Detail(
            expected=f"{', '.join(names[1:])} after each call of {names[0]}",
            seen=f"{names[0]} was called again without {', '.join(names[1:])} in between",
            function=functions_of(hypothesis)[0],
            advice=f"look for a path that leaves out {names[-1]} after {names[0]}",
        )


@dataclass(frozen=True)
class _Calls:
    """When the calls of each function of one thread ran: the last beginning and the first end."""

    last_begun: dict[str, int]
    first_ended: dict[str, int]

    def beside(self, a: str, b: str) -> bool:
        """Whether some call of one and some of the other were not nested."""
        if a == b or a not in self.last_begun or b not in self.last_begun:
            return False
        return self.last_begun[a] > self.first_ended[b] or self.last_begun[b] > self.first_ended[a]

    def beside_any(self, a: str) -> bool:
        return any(self.beside(a, b) for b in self.last_begun)


def _threads(seen: Records) -> dict[Thread, _Calls]:
    """Functions of every thread, without those that are called over and over."""
    repeated = {seen.names[c] for c, n in seen.consecutive.items() if n > MAX_CONSECUTIVE and c in seen.names}
    ended = pl.when(pl.col("status").is_null()).then(_NEVER).otherwise("t1")
    spans = seen.calls.group_by("proc", "thread", "name").agg(pl.col("t0").max(), ended.min().alias("t1"))
    out: dict[Thread, _Calls] = {}
    for proc, thread, name, begun, end in spans.iter_rows():
        function = seen.names[name]
        if function not in repeated:
            calls = out.setdefault((proc, thread), _Calls({}, {}))
            calls.last_begun[function], calls.first_ended[function] = begun, end
    return out


def _one_between(begun: Times, ended: Times, low: Times, high: Times) -> Times:
    """Whether a call began after `low` and ended by `high`, for each of these disjoint spans; calls by their beginning."""
    if not len(begun):
        return np.zeros(len(low), dtype=bool)
    first, last = np.searchsorted(begun, low, "right"), np.searchsorted(begun, high, "right")
    padded = np.append(ended, _NEVER)
    bounds = np.stack([first, np.maximum(first, last)], axis=1).reshape(-1)
    least = np.minimum.reduceat(padded, np.minimum(bounds, len(ended)))[::2]
    inside: Times = (last > first) & (least <= high)
    return inside


def functions_of(hypothesis: Hypothesis) -> list[str]:
    """Functions of a rule about order, in that order."""
    listed = decoded(hypothesis.get("functions"))
    return [str(n) for n in listed] if isinstance(listed, list) else []


