"""Evidence of rules: which examples are kept, which runs count, and that pieces of it merge."""

from __future__ import annotations

import msgspec
import polars as pl
import pytest
from infer_fakes import CALLS, OnlyCalls, trace

from proctor.infer import evidence as why
from proctor.infer.preconditions import infer_preconditions
from proctor.invariants.condition import Condition, Kind, Precondition, clip
from proctor.invariants.invariant import Diversity, Evidence, Example, Hypothesis, RunSupport
from proctor.invariants.pack import Source
from proctor.invariants.relations import Examples
from proctor.invariants.schema import Name


def learned():
    seen, relation = trace(CALLS), OnlyCalls()
    hypotheses = [Hypothesis.of("only", function=f) for f in ("step", "zero_grad", "rare")]
    examples = relation.examples(seen, hypotheses)
    return relation, seen, hypotheses, infer_preconditions(examples, min_support=3), examples


def test_every_run_is_counted_with_what_passed_inside_and_failed_outside():
    relation, seen, hypotheses, outcomes, examples = learned()
    found = why.collect(relation, seen, hypotheses, outcomes, examples)
    step = found[0]
    assert sum(r.passed for r in step.runs) == outcomes[0].passed == 12
    assert sum(r.excluded for r in step.runs) == outcomes[0].excluded == 5
    assert len(step.runs) == 2
    assert 2 not in found  # no rule, no evidence


def test_passing_examples_meet_the_precondition_and_failing_ones_do_not():
    relation, seen, hypotheses, outcomes, examples = learned()
    found = why.collect(relation, seen, hypotheses, outcomes, examples)
    for hyp, evidence in found.items():
        precondition = outcomes[hyp].precondition
        assert evidence.passing
        assert all(why.meets(e, precondition) for e in evidence.passing)
        assert not any(why.meets(e, precondition) for e in evidence.failing)
    assert why.separating(found[0].passing, found[0].failing) == ["phase"]


def test_without_outcomes_all_hypotheses_get_evidence_that_settles_later():
    relation, seen, hypotheses, outcomes, examples = learned()
    early = why.collect(relation, seen, hypotheses, None, examples)
    assert set(early) == {0, 1, 2}
    late = why.collect(relation, seen, hypotheses, outcomes, examples)
    assert why.settle(early[0], outcomes[0].precondition).passing == late[0].passing


def test_a_relation_that_cannot_describe_a_passing_example_still_gives_it():
    _relation, seen, hypotheses, outcomes, examples = learned()

    class Silent(OnlyCalls):
        def detail(self, trace, hypothesis, example):
            raise KeyError("no words")

    found = why.collect(Silent(), seen, hypotheses, outcomes, examples)
    assert found[0].passing
    assert found[0].passing[0].where == ""


def test_examples_of_different_programs_come_first():
    examples = [Example(s, 0, p, p) for p in "ab" for s in range(5)]
    kept = why.first(examples)
    assert [(e.program, e.step) for e in kept] == [("a", 0), ("b", 0), ("a", 1)]


def test_a_run_in_two_pieces_counts_once_or_adds_up():
    a = Evidence(runs=(RunSupport("r", 3, 1),))
    b = Evidence(runs=(RunSupport("r", 4), RunSupport("q", 1)))
    assert why.merge(a, b).runs == (RunSupport("q", 1), RunSupport("r", 4, 1))
    assert why.join_parts(a, b).runs == (RunSupport("q", 1), RunSupport("r", 7, 1))


def test_diversity_counts_programs_and_families_of_supporting_runs():
    sources = [Source("r", "a.py", "r", ("f",)), Source("q", "b.py", "q", ("f", "g")), Source("n", "c.py", "n", ("h",))]
    evidence = Evidence(runs=(RunSupport("q", 1), RunSupport("r", 1), RunSupport("n", 0, 4)))
    assert why.diversity(evidence, sources) == Diversity(2, 2)


def test_fields_that_say_nothing_are_left_out():
    def example(passed: bool, **fields: str) -> Example:
        return Example(0, 0, "a", "r", seen="" if passed else "no", fields=tuple(sorted(fields.items())))

    whole = Evidence((example(True, phase="train", noise="x", mode="m"),), (example(False, phase="eval", noise="x", mode="n"),))
    when = Precondition(((Condition("phase", Kind.CONSTANT, "train"),),))
    settled = why.settle(whole, when)
    assert settled.passing[0].fields == (("mode", "m"), ("phase", "train"))


@pytest.mark.parametrize(
    ("condition", "met"),
    [
        (Condition("a", Kind.CONSTANT, "x" * 999), True),
        (Condition("a", Kind.CONSTANT, "x" * 998), False),
        (Condition("b", Kind.CONSTANT, None), True),
        (Condition("a", Kind.EXIST), True),
        (Condition("b", Kind.EXIST), False),
        (Condition("a", Kind.CONSISTENT), True),
        (Condition("a", Kind.UNEQUAL), False),
        (Condition("b", Kind.UNEQUAL), False),
    ],
)
def test_a_condition_is_met_by_kept_fields_as_by_a_frame(condition, met):
    assert condition.met({"a": clip("x" * 999), "a~": "true"}) is met
    frame = pl.DataFrame({"a": ["x" * 999], "a~": [True], "b": [None]}, schema={"a": pl.String, "a~": pl.Boolean, "b": pl.String})
    assert frame.select(condition.holds(frozenset(frame.columns))).to_series()[0] is met


def test_evidence_is_small():
    relation, seen, hypotheses, outcomes, examples = learned()
    found = why.collect(relation, seen, hypotheses, outcomes, examples)
    assert all(len(msgspec.json.encode(e)) < 2000 for e in found.values())


@pytest.mark.parametrize(
    ("site", "kept"),
    [("/home/me/secret/proj/train.py:12", "proj/train.py:12"), ("src/train.py:12", "src/train.py:12"), ("/train.py:3", "/train.py:3")],
)
def test_a_pack_names_no_folders_of_one_machine(site, kept):
    seen, relation = trace(CALLS), OnlyCalls()
    seen.texts[Name.SITE] = ["", site]
    hypotheses = [Hypothesis.of("only", function="step")]
    examples = relation.examples(seen, hypotheses)
    placed = Examples(examples.frame.with_columns(pl.lit(1, dtype=pl.UInt32).alias("site")), examples.fields)
    assert why.collect(relation, seen, hypotheses, None, placed)[0].passing[0].source == kept
