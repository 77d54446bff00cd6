from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest
from helpers.live.flushes import flushes
from helpers.loops import loop
from helpers.runs import write_run

from proctor.errors import TraceError
from proctor.infer.engine import infer
from proctor.invariants.pack import Pack
from proctor.invariants.relations import Relation, registry
from proctor.invariants.trace import Trace
from proctor.verify.checker import check
from proctor.verify.live import online
from proctor.verify.live.online import OnlineChecker
from proctor.verify.live.pace import Pace

NAMES = ("contain", "sequence")
KNOWN = {name: registry()[name] for name in NAMES}


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    folder = tmp_path_factory.mktemp("healthy")
    paths = [write_run(folder / f"run{i}", [loop(steps=12)]) for i in range(2)]
    return Pack(infer(Trace.load(paths), list(KNOWN.values()), strict=True)[0])


@pytest.mark.parametrize("together", [True, False])
def test_a_violation_is_told_when_the_step_after_it_ends(tmp_path: Path, pack: Pack, together: bool) -> None:
    path = write_run(tmp_path / "run", [loop(steps=60, skip={20: ["backward"]})])
    checker = OnlineChecker([pack], relations=KNOWN, together=together)
    told = [(reached - 1, v) for process, part, info, reached in flushes(path) for v in checker.feed(process, part, info, reached)]
    told += [(checker.judged, v) for round_ in checker.finish() for v in round_.violations]
    rules = {rule.id: rule for rule in pack.invariants}
    assert told and all(v.step == 20 for _, v in told)
    quick = [over for over, v in told if not together or KNOWN[v.relation].reads_of(rules[v.id].hypothesis) in ("calls", "records")]
    assert max(quick) == 20 + max(KNOWN[name].ahead for name in NAMES)
    offline = check(Trace.load([path]), [pack], relations=KNOWN)
    assert {v.id for _, v in told} == {v.id for v in checker.result().violations} == {v.id for v in offline.violations}


def test_what_is_held_does_not_grow_with_the_run(tmp_path: Path, pack: Pack) -> None:
    path = write_run(tmp_path / "run", [loop(steps=90, skip={70: ["zero_grad"]}, clears=True)])
    checker = OnlineChecker([pack], relations=KNOWN, together=False)
    found, held = [], []
    for process, part, info, reached in flushes(path):
        found += checker.feed(process, part, info, reached)
        held.append(checker.live.rows)
    assert max(held[40:]) == max(held[8:20]) > 0
    assert {v.id for v in found} == {v.id for v in check(Trace.load([path]), [pack], relations=KNOWN).violations} != set()


def test_steps_that_look_alike_are_judged_once(tmp_path: Path, pack: Pack) -> None:
    asked = []

    class Counting(type(KNOWN["sequence"])):  # type: ignore[misc]
        def examples(self, trace, hypotheses):  # type: ignore[no-untyped-def]
            asked.append(trace.over)
            return super().examples(trace, hypotheses)

    path = write_run(tmp_path / "run", [loop(steps=40, skip={30: ["backward"]})])
    known: dict[str, Relation] = {"sequence": Counting()}
    checker = OnlineChecker([pack], relations=known, together=False)
    found = {v.id for process, part, info, reached in flushes(path) for v in checker.feed(process, part, info, reached)}
    assert found == {v.id for v in check(Trace.load([path]), [pack], relations=known).violations} != set()
    assert len([over for over in asked if 10 < over < 30]) == 0 < len([over for over in asked if over >= 30])


def test_nothing_is_judged_while_a_rank_has_not_come(tmp_path: Path, pack: Pack) -> None:
    path = write_run(tmp_path / "run", [loop(steps=30, skip={3: ["backward"]}), loop(steps=30)])
    checker = OnlineChecker([pack], relations=KNOWN)
    chunks = list(flushes(path))
    assert not any(checker.feed(*chunk) for chunk in chunks if chunk[0].startswith("0-"))
    assert any(checker.feed(*chunk) for chunk in chunks if chunk[0].startswith("1-"))


def test_a_rank_that_hangs_is_not_waited_for_for_ever(tmp_path: Path, pack: Pack) -> None:
    path = write_run(tmp_path / "run", [loop(steps=60, skip={3: ["backward"]}), loop(steps=60)])
    checker = OnlineChecker([pack], relations=KNOWN, patience=16)
    found = [v for chunk in flushes(path) if chunk[0].startswith("0-") for v in checker.feed(*chunk)]
    assert {v.step for v in found} == {3}


def test_records_that_were_lost_make_no_violation(tmp_path: Path, pack: Pack) -> None:
    path = write_run(tmp_path / "run", [loop(steps=30)])
    checker = OnlineChecker([pack], relations=KNOWN)
    found = []
    for number, (process, part, info, reached) in enumerate(flushes(path)):
        if number % 3 == 1:
            part["calls"] = part["calls"].slice(2)
            checker.live.member(process).lose(2)
        found += checker.feed(process, part, info, reached)
    assert not found and not checker.result().violations


def test_a_loss_makes_only_the_steps_around_it_unknown(tmp_path: Path, pack: Pack) -> None:
    path = write_run(tmp_path / "run", [loop(steps=60, skip={9: ["backward"], 40: ["backward"]})])
    checker = OnlineChecker([pack], relations=KNOWN)
    found = []
    for process, part, info, reached in flushes(path):
        if reached == 10:
            checker.live.member(process).lose(3)
        found += checker.feed(process, part, info, reached)
    assert {v.step for v in found} == {40}


def test_a_relation_that_fails_hides_no_other(tmp_path: Path, pack: Pack) -> None:
    class Broken(type(KNOWN["contain"])):  # type: ignore[misc]
        def examples(self, trace, hypotheses):  # type: ignore[no-untyped-def]
            raise RuntimeError("bad luck")

    path = write_run(tmp_path / "run", [loop(steps=20, skip={9: ["backward"]})])
    checker = OnlineChecker([pack], relations={**KNOWN, "contain": Broken()})
    found = [v for chunk in flushes(path) for v in checker.feed(*chunk)]
    assert found and list(checker.errors) == ["contain"]
    assert any("bad luck" in note for note in checker.result().notes)


def test_foreign_records_are_refused() -> None:
    checker = OnlineChecker([], relations=KNOWN)
    with pytest.raises(TraceError, match="calls"):
        checker.feed("0-1", {"calls": pa.table({"x": [1]})})
    with pytest.raises(TraceError, match="secrets"):
        checker.feed("0-1", {"secrets": pa.table({"x": [1]})})


def test_a_round_says_what_it_speaks_of(tmp_path: Path, pack: Pack) -> None:
    path = write_run(tmp_path / "run", [loop(steps=6)])
    checker = OnlineChecker([pack], relations=KNOWN, together=False)
    rounds = []
    for process, part, info, reached in flushes(path):
        checker.live.add(process, part, info, reached)
        rounds += checker.rounds()
    rounds += checker.finish()
    for name in NAMES:
        spans = [(r.first, r.end) for r in rounds if r.relation == name]
        assert spans[0][0] == -1 and spans[-1][1] == 6 + 1
        assert all(a[1] == b[0] for a, b in pairwise(spans))


def test_bit_by_bit_the_same_is_found(tmp_path: Path, pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(online, "_SLICE_S", 0.0)
    path = write_run(tmp_path / "run", [loop(steps=30, skip={20: ["backward"]})])
    whole, bits = OnlineChecker([pack], relations=KNOWN), OnlineChecker([pack], relations=KNOWN, pace=Pace(most_s=0.0))
    for process, part, info, reached in flushes(path):
        whole.feed(process, part, info, reached)
        bits.live.add(process, part, info, reached)
    calls = [len(list(bits.rounds(some=True)))]
    while bits.pending:
        calls.append(len(list(bits.rounds(some=True))))
        assert len(calls) < 1000
    assert len(calls) > 1 and bits.judged == whole.judged
    whole.finish()
    bits.finish()
    assert {v.id for v in bits.result().violations} == {v.id for v in whole.result().violations} != set()
