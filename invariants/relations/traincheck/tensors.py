"""Attributes of the tensors that a call takes and returns, as TrainCheck means it.

Three families: an attribute of every returned tensor is a constant; an attribute of an argument equals one of a result;
an attribute of a result is within an argument such as `max`. Calls that raised or never returned are not looked at. A
call whose results were not recorded fails the first rule, as it does in TrainCheck, if those of other calls were.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import polars as pl

from proctor.invariants.invariant import Hypothesis
from proctor.invariants.relations import Detail, Needs, register
from proctor.invariants.relations.traincheck.records import Records
from proctor.invariants.relations.traincheck.rule import (
    TrainCheckRule,
    decoded,
    example_rows,
    short,
    with_fields,
)
from proctor.invariants.relations.traincheck.tables import Record
from proctor.invariants.relations.traincheck.values import identity
from proctor.invariants.trace import Trace

_TENSOR: Final = re.compile(r"torch\..*Tensor")
_PARAMETER: Final = "Parameter"
_NOT_COMPARED: Final = "_TRAINCHECK_data_ID"  # of a result: the address of its data

# Whether a call passed, from its decoded arguments and result; `None`: the rule says nothing of it.
Test = Callable[[Mapping[str, Any], Mapping[str, Any]], bool | None]


class _Tensors(TrainCheckRule):
    """Judges each distinct pair of arguments and result once."""

    group = "pre_event"
    skipped: bool = True  # a call of which the rule says nothing is no example; else it cannot be decided

    def judge(self, seen: Records, trace: Trace, hypotheses: Sequence[Hypothesis]) -> list[pl.DataFrame]:
        out = []
        alike: dict[str, list[tuple[int, Hypothesis]]] = {}
        for hyp, h in enumerate(hypotheses):
            alike.setdefault(h.text("function"), []).append((hyp, h))
        for function, members in alike.items():
            calls = seen.calls_of(function).filter(pl.col("status") == int(Record.POST))
            if calls.is_empty():
                continue
            calls = with_fields(seen, calls, [h for _, h in members])
            pairs = calls.select("args", "ret").unique(maintain_order=True)
            parsed = seen.parse([*pairs["args"].to_list(), *pairs["ret"].to_list()])
            for hyp, h in members:
                test = self.test(seen, h)
                passed = [test(parsed[a], parsed[r]) for a, r in pairs.iter_rows()]
                judged = calls.join(
                    pairs.with_columns(pl.Series("_passed", passed, dtype=pl.Boolean)),
                    on=["args", "ret"],
                    maintain_order="left",
                )
                if self.skipped:
                    judged = judged.filter(pl.col("_passed").is_not_null())
                out.append(example_rows(hyp, h, judged.drop("_passed"), judged["_passed"]))
        return out

    def test(self, seen: Records, h: Hypothesis) -> Test:
        raise NotImplementedError

    def needs(self, hypothesis: Hypothesis) -> Needs:
        return Needs(functions=frozenset({hypothesis.text("function")}))

    def detail(self, trace: Trace, hypothesis: Hypothesis, example: Mapping[str, Any]) -> Detail:
        return Detail(
            expected=self.say(hypothesis),
            seen=f"a call of {short(hypothesis.text('function'))} for which that does not hold",
            function=hypothesis.text("function"),
            advice="look at the arguments of this call, and at autocast",
        )


@register
class Output(_Tensors):
    """An attribute of every tensor that a call returns is a constant."""

    name, code = "tc_output", "PR156"
    skipped = False

    def test(self, seen: Records, h: Hypothesis) -> Test:
        attr, wanted = h.text("attr"), identity(decoded(h.get("value")))

        def passed(args: Mapping[str, Any], ret: Mapping[str, Any]) -> bool | None:
            tensors = returned(ret)
            return bool(tensors) and all(attr in t and identity(t[attr]) == wanted for t in tensors)

        return passed

    def say(self, hypothesis: Hypothesis) -> str:
        return f"{short(hypothesis.text('function'))} returns tensors with {hypothesis.text('attr')} {hypothesis.text('value')}"


@register
class InputOutput(_Tensors):
    """An attribute of a tensor that a call takes equals one of a tensor that it returns."""

    name, code = "tc_input_output", "PR157"

    def test(self, seen: Records, h: Hypothesis) -> Test:
        taken_at, returned_at = _path(h, "input"), _path(h, "output")

        def passed(args: Mapping[str, Any], ret: Mapping[str, Any]) -> bool | None:
            try:
                a, b = _at(taken(args), taken_at), _at(returned(ret), returned_at)
            except (IndexError, KeyError, TypeError):
                return None
            return identity(a) == identity(b)

        return passed

    def say(self, hypothesis: Hypothesis) -> str:
        a, b = _said("input", _path(hypothesis, "input")), _said("output", _path(hypothesis, "output"))
        return f"in {short(hypothesis.text('function'))}, {a} equals {b}"


@register
class Threshold(_Tensors):
    """An attribute of a tensor that a call returns is at least, or at most, one of its arguments."""

    name, code = "tc_threshold", "PR158"
    skipped = False

    def test(self, seen: Records, h: Hypothesis) -> Test:
        function, argument, at = h.text("function"), h.text("argument"), _path(h, "output")
        least = h.get("least") is True

        def passed(args: Mapping[str, Any], ret: Mapping[str, Any]) -> bool | None:
            given = seen.arguments(function, args, defaults=True).get(argument)
            try:
                bound = next(iter(given.values())) if isinstance(given, dict) else None
                value = _at(returned(ret), at)
                return bool(value >= bound if least else value <= bound)
            except (IndexError, KeyError, TypeError, StopIteration):
                return None

        return passed

    def say(self, hypothesis: Hypothesis) -> str:
        bound = "at least" if hypothesis.get("least") is True else "at most"
        what = _said("output", _path(hypothesis, "output"))
        return f"in {short(hypothesis.text('function'))}, {what} is {bound} the argument {hypothesis.text('argument')}"


def taken(args: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Attributes of the tensors among the arguments: positional ones first."""
    given = [args.get(key) for key in ("args", "kwargs")]
    return [t for g in given if isinstance(g, dict) for typed in g.values() for t in _tensors(typed)]


def returned(ret: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Attributes of the tensors among the results."""
    values = ret.get("return_values")
    listed = values if isinstance(values, list) else [values]
    return [{k: v for k, v in t.items() if k != _NOT_COMPARED} for typed in listed for t in _tensors(typed)]


def _tensors(typed: Any) -> list[dict[str, Any]]:
    if not isinstance(typed, dict) or not typed:
        return []
    kind, attributes = next(iter(typed.items()))
    is_tensor = _TENSOR.match(kind) or _PARAMETER in kind
    return [attributes] if is_tensor and isinstance(attributes, dict) else []


def _path(h: Hypothesis, side: str) -> list[Any]:
    """Which tensor, and the way to the value in it."""
    path = decoded(h.get(side))
    return path if isinstance(path, list) else []


def _at(tensors: list[dict[str, Any]], path: list[Any]) -> Any:
    value: Any = tensors
    if len(path) < 2:
        raise KeyError("no path")
    for key in path:
        value = value[key]
    return value


def _said(side: str, path: list[Any]) -> str:
    """`input 0 shape[1]`."""
    index, attribute, *rest = [*path, "", ""][: max(len(path), 2)]
    return f"{side} {index} {attribute}" + "".join(f"[{r}]" for r in rest)
