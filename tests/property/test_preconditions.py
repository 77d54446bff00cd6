"""Laws of precondition inference (TrainCheck §3.6), against a brute-force reference on small inputs."""

from __future__ import annotations

import itertools
import random
from typing import Any, NamedTuple

import polars as pl
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from proctor.infer.preconditions import Outcome, infer_preconditions
from proctor.infer.preconditions.search import MAX_CLAUSES, MAX_UNCOVERED
from proctor.invariants.condition import AGREE, Condition, Kind, Precondition
from proctor.invariants.relations import Examples

FIELDS = ("a", "b", "c", "d")
PAIRED = ("a", "b")  # examples of several records; the others are of one
SCOPE = ("b", "d")


law = settings(deadline=None, max_examples=60)


class Row(NamedTuple):
    hyp: int
    passed: bool | None
    values: tuple[str | None, ...]
    agree: tuple[bool | None, ...]


def _cells() -> st.SearchStrategy[tuple[str | None, bool | None]]:
    """A value and whether records agree: a value that is shared is agreed on."""
    shared = st.sampled_from([("x", True), ("y", True), ("z", True), (None, True)])
    return st.one_of(shared, st.sampled_from([(None, False), (None, None)]))


@st.composite
def rows(draw: st.DrawFn, hyps: int = 1, undecided: bool = True) -> list[Row]:
    paired = st.tuples(*[_cells() for _ in PAIRED])
    single = st.tuples(*[st.sampled_from(["x", "y", None]) for _ in FIELDS[len(PAIRED) :]])
    outcome = st.sampled_from([True, True, False, None] if undecided else [True, True, False])
    table = draw(
        st.lists(st.tuples(st.integers(0, hyps - 1), outcome, paired, single), min_size=1, max_size=24)
    )
    return [
        Row(hyp, passed, (*(v for v, _ in cells), *rest), tuple(a for _, a in cells))
        for hyp, passed, cells, rest in table
    ]


def frame(table: list[Row]) -> pl.DataFrame:
    columns: dict[str, Any] = {
        "hyp": pl.Series([r.hyp for r in table], dtype=pl.UInt32),
        "passed": pl.Series([r.passed for r in table], dtype=pl.Boolean),
        "proc": pl.Series([0] * len(table), dtype=pl.UInt16),
    }
    for i, name in enumerate(FIELDS):
        columns[name] = pl.Series([r.values[i] for r in table], dtype=pl.String)
    for i, name in enumerate(PAIRED):
        columns[name + AGREE] = pl.Series([r.agree[i] for r in table], dtype=pl.Boolean)
    return pl.DataFrame(columns)


def learn(
    table: pl.DataFrame, scope: tuple[str, ...] = SCOPE, fields: tuple[str, ...] = FIELDS
) -> dict[int, Outcome]:
    return infer_preconditions(Examples(table, fields, scope), min_clause_support=1)


def met(table: pl.DataFrame, precondition: Precondition) -> pl.DataFrame:
    """Decided rows that meet a precondition, judged by the code that checks with it."""
    return table.filter(pl.col("passed").is_not_null()).filter(precondition.holds(frozenset(table.columns)))


def is_safe(table: pl.DataFrame, clause: tuple[Condition, ...]) -> bool:
    return bool(met(table, Precondition((clause,)))["passed"].all())


@law
@given(rows())
def test_no_failing_example_meets_it(table: list[Row]) -> None:
    seen = frame(table)
    for found in learn(seen).values():
        if found.precondition:
            assert met(seen, found.precondition)["passed"].all()


@law
@given(rows())
def test_nearly_all_passing_examples_meet_it_and_are_counted(table: list[Row]) -> None:
    seen = frame(table)
    for found in learn(seen).values():
        if found.precondition:
            covered, total = met(seen, found.precondition).height, seen.filter("passed").height
            assert covered == found.passed
            assert total - covered <= MAX_UNCOVERED * total
            assert 1 <= len(found.precondition.any_of) <= MAX_CLAUSES


@law
@given(rows(hyps=3), st.randoms(use_true_random=False))
def test_row_order_does_not_matter(table: list[Row], rng: random.Random) -> None:
    shuffled = rng.sample(table, len(table))
    assert learn(frame(shuffled)) == learn(frame(table))


@law
@given(rows(hyps=2), st.integers(2, 5))
def test_repeating_all_evidence_changes_counts_only(table: list[Row], times: int) -> None:
    once, often = learn(frame(table)), learn(frame(table * times))
    assert {h: (o.precondition, o.why) for h, o in once.items()} == {
        h: (o.precondition, o.why) for h, o in often.items()
    }
    assert {h: o.passed * times for h, o in once.items()} == {h: o.passed for h, o in often.items()}


@law
@given(rows(), st.randoms(use_true_random=False))
def test_repeating_some_examples_does_not_matter(table: list[Row], rng: random.Random) -> None:
    decided: dict[bool | None, set[object]] = {True: set(), False: set(), None: set()}
    for row in table:
        decided[row.passed].add((row.values, row.agree))
    assume(not decided[True] & decided[False])  # the share of contradicted examples is a matter of counts
    again = table + rng.choices(table, k=10)
    assert _said(learn(frame(again))) == _said(learn(frame(table)))


@law
@given(rows(hyps=2), st.permutations([*FIELDS, *(f + AGREE for f in PAIRED)]))
def test_order_of_columns_in_the_frame_does_not_matter(table: list[Row], order: list[str]) -> None:
    seen = frame(table)
    assert learn(seen.select("hyp", "passed", "proc", *order)) == learn(seen)


@law
@given(rows(hyps=2), st.sampled_from(["x", None]), st.integers(0, len(FIELDS)))
def test_an_irrelevant_constant_field_changes_nothing(
    table: list[Row], value: str | None, place: int
) -> None:
    seen = frame(table)
    fields = (*FIELDS[:place], "same", *FIELDS[place:])
    assert learn(seen.with_columns(pl.lit(value, dtype=pl.String).alias("same")), fields=fields) == learn(
        seen
    )


@law
@given(rows(hyps=3))
def test_hypotheses_do_not_influence_each_other(table: list[Row]) -> None:
    together = learn(frame(table))
    for hyp, found in together.items():
        assert learn(frame([r for r in table if r.hyp == hyp])) == {hyp: found}


@law
@given(rows())
def test_each_alternative_keeps_the_scope_that_its_examples_share(table: list[Row]) -> None:
    seen = frame(table)
    for found in learn(seen).values():
        for clause in found.precondition.any_of if found.precondition else ():
            examples = met(seen, Precondition((clause,)))
            for name in SCOPE:
                shared = examples[name].unique().to_list()
                said = [c.value for c in clause if c.field == name and c.kind is Kind.CONSTANT]
                if len(shared) == 1 and (shared[0] is not None or name not in PAIRED):
                    assert said == shared
                elif len(shared) > 1:
                    assert not said


@settings(law, max_examples=250)
@given(rows(undecided=False))
def test_a_single_conjunction_is_found_whenever_one_exists_and_is_the_weakest(table: list[Row]) -> None:
    seen = frame(table)
    passing = seen.filter("passed")
    assume(0 < passing.height < seen.height)
    shared = [c for c in _conditions(seen) if met(passing, Precondition(((c,),))).height == passing.height]
    exists = is_safe(seen, tuple(shared))  # safe at all, if the conjunction of everything is
    found = learn(seen, scope=())[0].precondition
    if not exists:
        assert found is None or len(found.any_of) > 1 or met(passing, found).height < passing.height
        return
    assert found is not None and len(found.any_of) == 1
    (clause,) = found.any_of
    assert set(clause) <= set(shared)
    parts = _parts(clause)
    for rest in itertools.chain.from_iterable(itertools.combinations(parts, n) for n in range(len(parts))):
        assert not is_safe(seen, tuple(c for part in rest for c in part))


@law
@given(rows(undecided=False))
def test_with_scope_no_other_condition_is_superfluous(table: list[Row]) -> None:
    seen = frame(table)
    found = learn(seen)[0].precondition
    if found is None or len(found.any_of) != 1:
        return
    parts = _parts(tuple(c for c in found.any_of[0] if c.field not in SCOPE))
    for rest in itertools.chain.from_iterable(itertools.combinations(parts, n) for n in range(len(parts))):
        assert not is_safe(seen, tuple(c for part in rest for c in part))


def _conditions(seen: pl.DataFrame) -> list[Condition]:
    """Everything that can be said: the reference is not clever."""
    passing = seen.filter("passed")
    found = [Condition(f, kind) for f in PAIRED for kind in (Kind.CONSISTENT, Kind.UNEQUAL)]
    found += [Condition(f, Kind.EXIST) for f in FIELDS]
    found += [Condition(f, Kind.CONSTANT, value) for f in FIELDS for value in ("x", "y", "z")]
    # Of several records, null says "not set" only where all agree.
    unset = [f for f in FIELDS if f not in PAIRED or passing[f + AGREE].fill_null(value=False).all()]
    return found + [Condition(f, Kind.CONSTANT, None) for f in unset]


def _parts(clause: tuple[Condition, ...]) -> list[tuple[Condition, ...]]:
    """Conditions that stand or fall together: *not set* of several records is said by two."""
    unset = {c.field for c in clause if c.field in PAIRED and c.kind is Kind.CONSTANT and c.value is None}
    pairs = [tuple(c for c in clause if c.field == f) for f in sorted(unset)]
    return pairs + [(c,) for c in clause if c.field not in unset]


def _said(outcomes: dict[int, Outcome]) -> dict[int, Precondition | None]:
    return {hyp: found.precondition for hyp, found in outcomes.items()}
