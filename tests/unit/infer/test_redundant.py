"""Rules that another rule implies go; those that merely passed together stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import polars as pl

from proctor.infer.selection.redundant import without_coincident, without_implied
from proctor.invariants.condition import ALWAYS, Condition, Kind, Precondition
from proctor.invariants.invariant import Evidence, Example, Hypothesis, Invariant, Support, invariant_id
from proctor.invariants.relations import Detail, Examples, Needs, Relation
from proctor.invariants.trace import Trace

TRAIN = Precondition(((Condition("phase", Kind.CONSTANT, "train"),),))
EVAL = Precondition(((Condition("phase", Kind.CONSTANT, "eval"),),))


class Bound(Relation):
    name = "bound"
    code = "PR198"
    narrowing = frozenset({"program"})

    def propose(self, trace: Trace) -> list[Hypothesis]:
        return []

    def examples(self, trace: Trace, hypotheses: Sequence[Hypothesis]) -> Examples:
        return Examples(pl.DataFrame(), ())

    def needs(self, hypothesis: Hypothesis) -> Needs:
        return Needs()

    def say(self, hypothesis: Hypothesis) -> str:
        return ""

    def detail(self, trace: Trace, hypothesis: Hypothesis, example: Mapping[str, Any]) -> Detail:
        return Detail("", "")


class AtLeast(Bound):
    """A relation that knows more: n ≥ 5 implies n ≥ 3."""

    name = "atleast"

    def implies(self, a: Hypothesis, b: Hypothesis) -> bool:
        return int(a.text("n")) >= int(b.text("n"))


KNOWN: dict[str, Relation] = {"bound": Bound(), "atleast": AtLeast()}


def rule(precondition: Precondition = ALWAYS, relation: str = "bound", programs: int = 1, blames: str = "", **params: str) -> Invariant:
    hypothesis = Hypothesis.of(relation, **params)
    evidence = Evidence(failing=(Example(0, 0, "a.py", "r", where=blames),)) if blames else Evidence()
    identity = invariant_id(hypothesis, precondition)
    return Invariant(identity, hypothesis, precondition, Support(9, 0, 1, programs), "text", evidence=evidence)


def left(*rules: Invariant) -> list[Invariant]:
    return without_implied(rules, KNOWN)[0]


def test_a_rule_bound_to_a_program_goes_where_the_free_one_is_there():
    free, bound = rule(fn="f"), rule(fn="f", program="p")
    assert left(bound, free) == left(free, bound) == [free]
    (gone,) = without_implied([bound, free], KNOWN)[1]
    assert (gone.rule, gone.kept, gone.why) == (bound.id, free.id, "implied")


def test_an_empty_parameter_is_one_that_is_not_set():
    free, bound = rule(fn="f", program=""), rule(fn="f", program="p")
    assert left(bound, free) == [free]


def test_another_function_or_program_is_another_rule():
    rules = [rule(fn="f", program="p"), rule(fn="f", program="q"), rule(fn="g"), rule(fn="g", other="x")]
    assert left(*rules) == rules


def test_a_weaker_precondition_implies_and_a_stronger_one_does_not():
    always, train, evaluation = rule(fn="f"), rule(TRAIN, fn="f"), rule(EVAL, fn="f")
    assert left(train, always, evaluation) == [always]
    assert left(train, evaluation) == [train, evaluation]
    either = rule(Precondition((*TRAIN.any_of, *EVAL.any_of)), fn="f")
    assert left(train, either, evaluation) == [either]
    assert left(rule(TRAIN, fn="f"), rule(fn="f", program="p")) == [rule(TRAIN, fn="f"), rule(fn="f", program="p")]


def test_of_equal_rules_the_better_supported_stays():
    weak, strong = rule(fn="f"), msgspec.structs.replace(rule(fn="f"), support=Support(9, 0, 5, 4))
    assert left(weak, strong) == left(strong, weak) == [strong]
    assert left(weak, weak, weak) == [weak]


def test_a_relation_may_say_itself_what_implies_what():
    three, five = rule(relation="atleast", n="3"), rule(relation="atleast", n="5")
    assert left(three, five) == [five]


def test_a_chain_keeps_its_head_and_names_it_or_another_that_stays():
    chain = [rule(relation="atleast", n=str(n)) for n in range(6)]
    kept, gone = without_implied(chain, KNOWN)
    assert kept == [chain[5]]
    assert len(gone) == 5


def test_rules_of_unknown_relations_stay():
    odd = rule(relation="nonesuch", fn="f")
    assert left(odd, odd) == [odd, odd]


# -- coincident -------------------------------------------------------------------------------------------------


def examples(*columns: Sequence[bool]) -> Examples:
    rows = [(hyp, passed, 0, i, i) for hyp, column in enumerate(columns) for i, passed in enumerate(column)]
    return Examples(pl.DataFrame(rows, schema=["hyp", "passed", "proc", "step", "seq"], orient="row"), ())


def coincident(pair: Sequence[Invariant], seen: Examples) -> list[Invariant]:
    return without_coincident(pair, [r.hypothesis for r in pair], seen)[0]


BAD = [True] * 5 + [False] * 3


def test_rules_that_failed_on_the_same_records_and_blame_one_function_are_one():
    pair = [rule(fn="f", given="a", blames="f"), rule(fn="f", given="b", blames="f", programs=2)]
    assert coincident(pair, examples(BAD, BAD)) == [pair[1]]


def test_rules_that_only_passed_together_are_two():
    pair = [rule(fn="f", given="a", blames="f"), rule(fn="f", given="b", blames="f")]
    assert coincident(pair, examples([True] * 8, [True] * 8)) == pair
    assert coincident(pair, examples([True] * 6 + [False] * 2, [True] * 6 + [False] * 2)) == pair


def test_one_record_apart_is_two_rules():
    pair = [rule(fn="f", given="a", blames="f"), rule(fn="f", given="b", blames="f")]
    assert coincident(pair, examples(BAD, BAD[::-1])) == pair


def test_rules_that_blame_different_functions_are_two():
    pair = [rule(fn="f", given="a", blames="f"), rule(fn="f", given="b", blames="g")]
    assert coincident(pair, examples(BAD, BAD)) == pair
    nameless = [rule(fn="f", given="a"), rule(fn="f", given="b")]
    assert coincident(nameless, examples(BAD, BAD)) == nameless


def test_rules_that_differ_in_two_parameters_or_in_their_precondition_are_two():
    pair = [rule(fn="f", given="a", of="x", blames="f"), rule(fn="f", given="b", of="y", blames="f")]
    assert coincident(pair, examples(BAD, BAD)) == pair
    when = [rule(TRAIN, fn="f", given="a", blames="f"), rule(EVAL, fn="f", given="b", blames="f")]
    assert coincident(when, examples(BAD, BAD)) == when
