"""What holds of incidents whatever the verdicts are, in whatever pieces they come, and whenever the verifier is killed."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from helpers.verdicts import RELATIONS, Book, Steps, failed, held, violation
from hypothesis import given, settings
from hypothesis import strategies as st

from proctor.invariants.invariant import Severity, Tier
from proctor.verify.checker import Judged
from proctor.verify.lifecycle import Policy
from proctor.verify.lifecycle.record import MAX_KEPT, MAX_KEYS, MAX_RULES
from proctor.verify.notice import Notice

RULES: dict[str, dict[str, Any]] = {
    "a": {"family": "sure", "variable": "net.fc.weight"},
    "b": {"family": "near", "variable": "net.fc.bias"},
    "c": {"family": "late", "variable": "net.ln.weight", "function": "f"},
    "d": {"family": "chance", "variable": "net.fc.weight", "severity": Severity.WARNING},
    "e": {"family": "chance", "variable": "emb.weight", "tier": Tier.PAGE},
    "f": {"family": "sure", "function": "f", "severity": Severity.CRITICAL},
    "g": {"family": "late", "variable": "head.weight"},
    "h": {"family": "near", "variable": "head.weight", "sides": ((1,), (0, 2, 3))},
}
POLICY = Policy(hold_s=0, clean=3, storm=4, max_retriggers_per_hour=1000)

Verdicts = Sequence[frozenset[str]]
"""Of each step, the rules that fail; all others hold."""

verdicts = st.lists(st.frozensets(st.sampled_from(sorted(RULES)), max_size=6), min_size=1, max_size=24)
cuts = st.sets(st.integers(1, 25))


def rounds(stream: Verdicts, begin: int, end: int) -> list[Steps]:
    """What is said when the steps up to `end` are over, and those up to `begin` were before."""
    out = []
    for family, relation in RELATIONS.items():
        first, last = begin - relation.ahead, min(end - relation.ahead, len(stream))
        steps = range(max(0, first), last)
        judged: list[Judged] = []
        for rule, about in RULES.items():
            if about["family"] != family or not steps:
                continue
            bad = [s for s in steps if rule in stream[s]]
            if bad:
                judged.append(failed(violation(rule, bad[0], **about, places=[(s, 0) for s in bad]), met=len(steps)))
            else:
                judged.append(held(rule, met=len(steps), family=family))
        out.append(Steps(steps.start, steps.stop, judged))
    return out


def play(stream: Verdicts, bounds: Sequence[int], path: Path | None = None, kills: frozenset[int] = frozenset()) -> Book:
    book = Book(POLICY, path=path, ranks=4)
    for begin, end in pairwise(bounds):
        book.steps(*rounds(stream, begin, end))
        if begin in kills:
            book.book.save()
            book.book.taken()
            book.kill()
    return book


def summary(book: Book) -> list[tuple[Any, ...]]:
    return sorted(
        (i.key, i.state, i.flaps, i.first_step, sorted(i.rules), i.title, i.severity, i.tier)
        for i in book.book.incidents
        if not i.merged
    )


@settings(max_examples=150, deadline=None)
@given(verdicts, cuts)
def test_pieces_do_not_matter(stream, cut):
    n = len(stream) + 2
    alone = play(stream, range(n))
    pieces = play(stream, sorted({0, n - 1, *(c for c in cut if c < n)}))
    assert summary(pieces) == summary(alone)


@settings(max_examples=60, deadline=None)
@given(verdicts, st.frozensets(st.integers(0, 25)))
def test_a_kill_changes_nothing(stream, kills):
    bounds = range(len(stream) + 2)
    with tempfile.TemporaryDirectory() as folder:
        killed = play(stream, bounds, Path(folder) / "incidents.json", kills)
        never = play(stream, bounds)
        assert killed.told == never.told
        assert summary(killed) == summary(never)


@settings(max_examples=150, deadline=None)
@given(verdicts, cuts, st.integers(0, 2))
def test_begin_and_end_alternate(stream, cut, retriggers):
    n = len(stream) + 2
    book = Book(Policy(hold_s=0, clean=1, storm=4, max_retriggers_per_hour=retriggers))
    for begin, end in pairwise(sorted({0, n - 1, *(c for c in cut if c < n)})):
        book.steps(*rounds(stream, begin, end))
        book.tick(900)
    by_key: dict[str, list[Notice]] = defaultdict(list)
    for notice in book.told:
        by_key[notice.key].append(notice)
    for notices in by_key.values():
        assert notices[0].action == "trigger"
        for a, b in pairwise(notices):
            louder = (b.severity.level, b.tier is Tier.PAGE) > (a.severity.level, a.tier is Tier.PAGE)
            assert a.action != b.action or (b.action == "trigger" and louder)
    firing = {i.key for i in book.book.incidents if i.said is not None}
    assert firing == {key for key, notices in by_key.items() if notices[-1].action == "trigger"}


@given(st.lists(st.lists(st.tuples(st.sampled_from(sorted(RULES)), st.integers(0, 4), st.integers(0, 4)), max_size=8), max_size=10))
def test_unknown_opens_nothing(stream):
    book = Book(POLICY)
    for step, said in enumerate(stream):
        book.step(step, *(held(rule, met=met + unknown, undecided=unknown) for rule, met, unknown in said))
    assert book.told == [] and book.book.incidents == []


@settings(max_examples=40, deadline=None)
@given(st.integers(3, 4096), st.data())
def test_one_cause_is_one_trigger_on_any_number_of_ranks(ranks, data):
    few = data.draw(st.sets(st.integers(0, ranks - 1), min_size=1, max_size=(ranks - 1) // 2))
    sides = (tuple(sorted(few)), tuple(r for r in range(ranks) if r not in few))
    book = Book(ranks=ranks)
    for step in range(3, 6):
        names = data.draw(st.permutations(["ln.weight", "ln.weight.grad", "ln.bias", "fc.weight"]))
        book.step(step, *(failed(violation(name, step, variable=name, sides=sides, count=ranks)) for name in names))
    [notice] = book.told
    assert notice.details["ranks"].startswith(f"{len(few)} of {ranks}: ")
    assert book.book.incidents[0].minority == sorted(few)[:256]


def test_what_is_held_is_bounded_whatever_is_found(tmp_path):
    book, sizes = Book(Policy(hold_s=0, max_open=10)), []
    book.path = book.book.state_path = tmp_path / "incidents.json"
    for step in range(100):
        found = (violation(f"{step}-{i}", step, variable=f"v{step}.{i}", function=f"f{step}.{i}") for i in range(1000))
        book.step(step, *map(failed, found))
        book.told.clear()
        book.book.taken()
        if step % 10 == 9:
            assert book.book.save()
            sizes.append(book.path.stat().st_size)
    assert sizes[-1] < 1.1 * sizes[4] < 2e6
    assert sum(i.open for i in book.book.incidents) <= 10
    for incident in book.book.incidents:
        assert len(incident.rules) <= MAX_RULES and len(incident.violations) <= MAX_KEPT and len(incident.keys) <= MAX_KEYS + 1
