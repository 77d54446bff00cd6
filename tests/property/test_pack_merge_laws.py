"""Merging packs is associative, commutative and idempotent, and never claims what a healthy run contradicts."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from proctor.infer.evidence import family_id
from proctor.infer.merging import combine, merge_packs
from proctor.invariants.condition import FAMILY, Condition, Kind, Precondition
from proctor.invariants.invariant import (
    Evidence,
    Example,
    FalseAlarm,
    Hypothesis,
    Invariant,
    Part,
    RunSupport,
    Severity,
    Support,
    hypothesis_id,
    invariant_id,
)
from proctor.invariants.pack import Measured, Pack, Provenance, Refuted, Source
from proctor.invariants.suppression import Suppression

VALUES = ("a", "b")
CONDITIONS = st.one_of(
    st.builds(Condition, st.sampled_from(["x", "y", FAMILY]), st.just(Kind.CONSTANT), st.sampled_from([None, *VALUES])),
    st.builds(Condition, st.sampled_from(["x", "y"]), st.sampled_from([Kind.EXIST, Kind.CONSISTENT, Kind.UNEQUAL])),
)
CLAUSES = st.lists(CONDITIONS, max_size=3).map(lambda c: tuple(dict.fromkeys(c)))
PRECONDITIONS = st.lists(CLAUSES, min_size=1, max_size=3).map(lambda c: Precondition(tuple(dict.fromkeys(c))))
RUNS = [Source(f"r{i}", f"p{i % 3}.py", f"run{i}", (family_id(VALUES[i % 2]),), 10 + i) for i in range(5)]
EXAMPLES = st.builds(
    Example, st.integers(-1, 3), st.integers(0, 1), st.sampled_from(["p0.py", "p1.py"]), st.sampled_from(["r0", "r1"])
)


@st.composite
def rules(draw: st.DrawFn, sources: list[Source]) -> Invariant:
    hypothesis = Hypothesis.of("test", n=draw(st.integers(0, 2)))
    precondition = draw(PRECONDITIONS)
    runs = tuple(RunSupport(s.id, draw(st.integers(1, 4)), draw(st.integers(0, 1))) for s in sources)
    passed, excluded = sum(r.passed for r in runs), sum(r.excluded for r in runs)
    failed = draw(st.integers(0, 2))
    return Invariant(
        id=invariant_id(hypothesis, precondition),
        hypothesis=hypothesis,
        precondition=precondition,
        support=Support(passed, excluded, len(runs), len({s.program for s in sources})),
        text=draw(st.sampled_from(["one", "two"])),
        severity=draw(st.sampled_from(list(Severity))),
        evidence=Evidence(tuple(draw(st.lists(EXAMPLES, max_size=3))), (), runs),
        false_alarm=draw(st.sampled_from([None, FalseAlarm.of(failed + 3, failed)])),
    )


@st.composite
def packs(draw: st.DrawFn) -> Pack:
    known = sorted(draw(st.sets(st.sampled_from(RUNS), max_size=3)))
    found = draw(st.lists(rules(known), max_size=3, unique_by=lambda r: r.hypothesis))
    return Pack(
        found,
        Provenance(
            tool="proctor 1",
            torch=draw(st.sampled_from(["2.6", "2.7"])),
            runs=len(known),
            programs=sorted({s.program for s in known}),
            sources=tuple(known),
            measured=draw(st.sampled_from([None, Measured(1, 2, 3, 0)])),
        ),
        requires=draw(st.sampled_from([{}, {"torch": ">=2.6,<3"}, {"lib": ""}])),
        suppressions=tuple(Suppression(r.id, "because") for r in found[:1]),
        refuted=tuple(Refuted(hypothesis_id(Hypothesis.of("test", n=n))) for n in draw(st.sets(st.integers(0, 2), max_size=1))),
    )


def merged(*several: Pack) -> bytes:
    return msgspec.json.encode(merge_packs(several)[0])


@settings(deadline=None, max_examples=200)
@given(packs(), packs(), packs())
def test_any_order_and_bracketing_gives_one_pack(a: Pack, b: Pack, c: Pack) -> None:
    whole = merged(a, b, c)
    assert merged(c, a, b) == whole
    assert merged(merge_packs([a, b])[0], c) == whole
    assert merged(a, merge_packs([c, b])[0]) == whole


@settings(deadline=None)
@given(packs(), packs())
def test_a_pack_that_is_merged_twice_counts_once(a: Pack, b: Pack) -> None:
    once = merge_packs([a, b])[0]
    assert merged(once, once) == msgspec.json.encode(once)
    assert merged(once, a) == msgspec.json.encode(once)


FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "x": st.sampled_from(VALUES),
        "y": st.sampled_from(VALUES),
        "x~": st.sampled_from(["true", "false"]),
        "y~": st.sampled_from(["true", "false"]),
    },
)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(PRECONDITIONS, st.booleans(), st.sampled_from(VALUES)), min_size=1, max_size=3), FIELDS)
def test_no_clause_reaches_what_failed_in_a_pack(said: list[tuple[Precondition, bool, str]], fields: dict[str, str]) -> None:
    parts = [Part(p, Support(1, int(failing), 1, 1), (family_id(v),), failing) for p, failing, v in said]
    result = combine(parts)
    for part, (precondition, failing, family) in zip(parts, said, strict=True):
        example = {**fields, FAMILY: family}
        outside = failing and not _meets(example, precondition)
        if outside:  # a failing example that this pack may have seen
            assert not _meets(example, result), (part, result)


def _meets(fields: dict[str, str], precondition: Precondition) -> bool:
    return any(all(c.met(fields) for c in clause) for clause in precondition.any_of)
