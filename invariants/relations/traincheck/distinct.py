"""A function never gets the same arguments twice in a step, as TrainCheck means it.

Compared are positional arguments only, attributes and addresses of tensors included; shapes that share a tenth of their
sizes count as the same. Two weights that were drawn over the same memory are what it catches.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain, combinations, islice
from typing import Any, Final

import polars as pl

from proctor.invariants.condition import AGREE
from proctor.invariants.invariant import Hypothesis
from proctor.invariants.relations import Detail, Needs, register
from proctor.invariants.relations.traincheck.fields import agreement_of_all, columns
from proctor.invariants.relations.traincheck.records import Records
from proctor.invariants.relations.traincheck.rule import TrainCheckRule, example_rows, fields_of, short
from proctor.invariants.relations.traincheck.tables import CONTEXT_MANAGERS, STEP
from proctor.invariants.relations.traincheck.values import alike, skeleton
from proctor.invariants.trace import Trace

_MAX_COMPARED: Final = 2_000_000  # pairs of arguments that differ only in floats and shapes, in one step


@register
class Distinct(TrainCheckRule):
    """Within a step, no two calls of a function have the same arguments."""

    name, code = "tc_distinct", "PR154"
    group = "distinct_arg"
    upstream = 2

    def judge(self, seen: Records, trace: Trace, hypotheses: Sequence[Hypothesis]) -> list[pl.DataFrame]:
        out = []
        for hyp, h in enumerate(hypotheses):
            calls = seen.calls_of(h.text("function"))
            # Every call is a record of one example: TrainCheck asks the precondition of all of them at once.
            texts = columns(seen, calls, fields_of([h]))
            texts = texts.with_columns(pl.col(f).first() for f in texts.columns if f.startswith(CONTEXT_MANAGERS))
            shared = agreement_of_all(texts)
            steps = _steps(calls.with_columns(columns(seen, calls, [STEP])[STEP].alias("_step")))
            twins = [_alike(seen, step["args"].to_list()) for step in steps]
            places = [s.row(-1 if t is None else t[1], named=True) for s, t in zip(steps, twins, strict=True)]
            kinds = {c: pl.Boolean if c.endswith(AGREE) else pl.String for c in shared}
            rows = pl.DataFrame(places, schema=calls.schema).with_columns(
                pl.lit(value, dtype=kinds[c]).alias(c) for c, value in shared.items()
            )
            out.append(example_rows(hyp, h, rows, [t is None for t in twins]))
        return out

    def needs(self, hypothesis: Hypothesis) -> Needs:
        return Needs(functions=frozenset({hypothesis.text("function")}))

    def say(self, hypothesis: Hypothesis) -> str:
        return f"{short(hypothesis.text('function'))} never gets the same arguments twice in a step"

    def detail(self, trace: Trace, hypothesis: Hypothesis, example: Mapping[str, Any]) -> Detail:
        name = short(hypothesis.text("function"))
        return Detail(
            expected="other arguments in every call of the step",
            seen=f"two calls of {name} with the same arguments",
            function=hypothesis.text("function"),
            advice="look whether the same tensor, or the same memory, is used twice",
        )


def _steps(calls: pl.DataFrame) -> list[pl.DataFrame]:
    """Calls of every step. A call without a step is a step of its own, unless none has one: then all are before it."""
    alone = pl.format("?{}", pl.int_range(pl.len())) if calls["_step"].null_count() < calls.height else pl.lit("")
    return calls.with_columns(pl.coalesce("_step", alone)).partition_by("_step", maintain_order=True, include_key=False)


def _alike(seen: Records, codes: list[int]) -> tuple[int, int] | None:
    """Positions of two calls with the same positional arguments."""
    parsed = seen.parse(codes)
    places: dict[int, list[int]] = {}
    for place, code in enumerate(codes):
        if isinstance(parsed[code].get("args"), dict):
            places.setdefault(code, []).append(place)
    groups: dict[str, list[int]] = {}
    for code, where in places.items():
        args = parsed[code]["args"]
        if len(where) > 1 and alike(args, args):
            return where[0], where[1]
        groups.setdefault(json.dumps(skeleton(args), sort_keys=True), []).append(code)
    pairs = chain.from_iterable(combinations(members, 2) for members in groups.values())
    for a, b in islice(pairs, _MAX_COMPARED):
        if alike(parsed[a]["args"], parsed[b]["args"]):
            first, second = sorted((places[a][0], places[b][0]))
            return first, second
    return None
