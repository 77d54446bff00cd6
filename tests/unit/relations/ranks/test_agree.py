"""`agree`: ranks make the same collective calls in the same order, and nobody waits in vain."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from helpers.runs import write_run

from proctor.invariants.codec import collective
from proctor.invariants.codec.collective import Group
from proctor.invariants.invariant import Hypothesis
from proctor.invariants.relations.agree import Agree
from proctor.invariants.relations.views import collectives as _collectives
from proctor.invariants.trace import Trace

RELATION = Agree()
FLOATS = {"dtype": "float32", "shape": "[4,4]"}
SECOND = 1_000_000_000


def place(fn: str, ranks: tuple[int, ...], name: str = "0", **more: Any) -> str:
    return collective.text(fn, Group(name, collective.ranks_text(ranks)), **more)


def rank(rank: int, said: list[tuple[Any, ...]], **info: Any) -> dict[str, Any]:
    """One rank that makes these calls: (function, step), and more of `place` or of the row as a mapping."""
    calls: list[dict[str, Any]] = []
    values: list[dict[str, Any]] = []
    counts: dict[str, int] = {}
    for seq, (fn, step, *rest) in enumerate(said, start=1):
        more = dict(rest[0]) if rest else {}
        ranks, name = more.pop("ranks", (0, 1)), more.pop("name", "0")
        row = {k: more.pop(k) for k in ("meta", "fp", "flags", "dur") if k in more}
        where = place(fn, ranks, name, **more)
        channel = f"{name} {more.get('peer', '')}"
        item = counts[channel] = counts.get(channel, -1) + 1
        if row.pop("open", None) is None:
            calls.append({"fn": f"torch.distributed.{fn}", "seq": seq, "step": step, "site": f"train.py:{10 + seq}", **{k: row[k] for k in ("flags", "dur") if k in row}})
        values.append({"kind": "sent", "seq": seq, "place": where, "item": item, "step": step, "meta": row.get("meta", FLOATS), "fp": 0})
        if "fp" in row:
            values.append({"kind": "received", "seq": seq, "place": where, "item": item, "step": step, "fp": row["fp"]})
    return {"rank": rank, "calls": calls, "values": values, **info}


def trace(path: Path, *ranks: dict[str, Any]) -> Trace:
    return Trace.load([write_run(path / f"run{next(_numbers)}", [{"world": len(ranks), **r} for r in ranks])])


_numbers = itertools.count()
STEADY = [("all_reduce", step, {"op": "SUM", "caller": "train.average"}) for step in range(4)]


def failures(run: Trace, what: str, **params: str) -> list[str]:
    frame = RELATION.examples(run, [Hypothesis.of("agree", what=what, **params)]).frame
    return [row["_seen"] for row in frame.filter(~frame["passed"].fill_null(value=True)).iter_rows(named=True)]


def whats(run: Trace) -> set[str]:
    return {h.text("what") for h in RELATION.propose(run)}


def test_ranks_that_agree_fail_in_no_respect(tmp_path: Path) -> None:
    run = trace(tmp_path, rank(0, STEADY), rank(1, STEADY))
    assert whats(run) == {"function", "arguments", "tensor", "step", "caller", "count", "turn"}
    frame = RELATION.examples(run, RELATION.propose(run)).frame
    assert frame["passed"].all()


def test_a_call_that_one_rank_skips_shifts_the_steps_of_the_following(tmp_path: Path) -> None:
    run = trace(tmp_path, rank(0, STEADY), rank(1, STEADY[:1] + STEADY[2:]))
    assert failures(run, "step")[0] == "step 1 on rank 0 against step 2 on rank 1"
    assert failures(run, "count") == ["4 calls of all_reduce on rank 0 against 3 calls of all_reduce on rank 1"]


def test_another_function_operation_shape_or_caller_is_told(tmp_path: Path) -> None:
    def odd(**more: Any) -> list[str]:
        what = more.pop("what")
        fn = more.pop("fn", "all_reduce")
        calls = [*STEADY[:2], (fn, 2, {"op": "SUM", "caller": "train.average", **more}), STEADY[3]]
        return failures(trace(tmp_path, rank(0, STEADY), rank(1, STEADY), rank(2, calls)), what)

    assert odd(what="function", fn="broadcast") == ["broadcast on rank 2 against all_reduce on rank 0, 1"]
    assert odd(what="arguments", op="MAX") == ["MAX on rank 2 against SUM on rank 0, 1"]
    assert odd(what="tensor", meta={"dtype": "float32", "shape": "[2]"}) == ["float32 [2] on rank 2 against float32 [4,4] on rank 0, 1"]
    assert odd(what="caller", caller="train.metrics") == ["train.metrics on rank 2 against train.average on rank 0, 1"]


def test_results_must_have_the_same_bits(tmp_path: Path) -> None:
    said = [("all_reduce", s, {"op": "SUM", "fp": 5 + s}) for s in range(3)]
    other = [*said[:2], ("all_reduce", 2, {"op": "SUM", "fp": 99})]
    assert failures(trace(tmp_path, rank(0, said), rank(1, said)), "result") == []
    assert len(failures(trace(tmp_path, rank(0, said), rank(1, other)), "result")) == 1


def test_groups_are_apart_and_a_group_of_one_is_no_group(tmp_path: Path) -> None:
    def calls(me: int) -> list[tuple[Any, ...]]:
        pair = (0, 1) if me < 2 else (2, 3)
        own = [("all_reduce", 0, {"op": "MAX", "ranks": (me,), "name": f"{9 + me}"})] * (me + 1)
        return [*own, *[("broadcast", s, {"root": pair[0], "ranks": pair, "name": str(pair[0] + 1)}) for s in range(3 + (me > 1))]]

    run = trace(tmp_path, *(rank(r, calls(r)) for r in range(4)))
    frame = RELATION.examples(run, RELATION.propose(run)).frame
    assert frame["passed"].all()
    assert set(frame["group"]) == {"part"}


def test_ranks_in_another_order_of_folders_give_the_same_verdicts(tmp_path: Path) -> None:
    odd = [*STEADY[:2], ("broadcast", 2, {"root": 0}), STEADY[3]]
    ranks = [rank(0, STEADY), rank(1, STEADY), rank(2, odd)]
    seen = [failures(trace(tmp_path / str(i), *order), "function") for i, order in enumerate(itertools.permutations(ranks))]
    assert all(s == seen[0] for s in seen)


def test_what_is_sent_is_held_against_what_is_received(tmp_path: Path) -> None:
    def talk(shape: str) -> Trace:
        take = {"dtype": "float32", "shape": shape}
        sends = [("send", s, {"peer": 1}) for s in range(3)]
        takes = [("recv", s, {"peer": 0, "meta": take if s == 2 else FLOATS}) for s in range(3)]
        return trace(tmp_path, rank(0, sends), rank(1, takes))

    assert failures(talk("[4,4]"), "pair") == []
    assert failures(talk("[4]"), "pair") == ["float32 [4,4] on rank 0 against float32 [4] on rank 1"]
    assert whats(talk("[4,4]")) >= {"pair"}


# -- a job that hangs ---------------------------------------------------------------------------------------------------


def waiting(item: int, seconds: float, fn: str = "all_reduce", **more: Any) -> dict[str, Any]:
    """What process.json says of a call that does not return."""
    where = place(fn, more.pop("ranks", (0, 1, 2)), **({"op": "SUM"} if fn == "all_reduce" else {}), **more)
    said = {"place": where, "item": item, "since": 100 * SECOND, "site": "train.py:40", "call": 9}
    return {"finished": False, "clock": int((100 + seconds) * SECOND), "open": [said]}


def calls(n: int, ranks: tuple[int, ...] = (0, 1, 2)) -> list[tuple[Any, ...]]:
    return [("all_reduce", s, {"op": "SUM", "ranks": ranks}) for s in range(n)]


def test_a_rank_that_ended_is_waited_for_in_vain(tmp_path: Path) -> None:
    stuck = rank(0, [*calls(3), ("all_reduce", 3, {"op": "SUM", "ranks": (0, 1, 2)})], **waiting(3, 6))
    run = trace(tmp_path, stuck, rank(1, calls(3)), {**stuck, "rank": 2})
    (seen,) = failures(run, "turn", patience="10")
    assert seen == (
        "rank 1 stopped issuing collectives after call 3 of the group (all_reduce at train.py:13, step 2) and has ended; "
        "ranks 0, 2 wait in all_reduce at train.py:40 for 6 s"
    )


@pytest.mark.parametrize(("seconds", "found"), [(6, 0), (40, 1)])
def test_a_busy_rank_has_time(tmp_path: Path, seconds: float, found: int) -> None:
    stuck = rank(0, calls(4, (0, 1)), **waiting(3, seconds, ranks=(0, 1)))
    run = trace(tmp_path, stuck, rank(1, calls(3, (0, 1)), finished=False))
    assert len(failures(run, "turn", patience="10")) == found


def test_two_ranks_that_wait_for_each_other_in_two_groups_are_stuck_at_once(tmp_path: Path) -> None:
    one = rank(0, calls(4, (0, 1)), **waiting(3, 5, ranks=(0, 1)))
    two = rank(1, [*calls(3, (0, 1)), ("barrier", 3, {"ranks": (0, 1), "name": "7"})], **waiting(0, 5, "barrier", ranks=(0, 1), name="7"))
    found = failures(trace(tmp_path, one, two), "turn", patience="60")
    assert len(found) == 2
    assert any("waits in another one" in text for text in found)


def test_a_chain_of_waits_that_ends_in_a_busy_rank_is_not_stuck(tmp_path: Path) -> None:
    first = rank(0, calls(4, (0, 1)), **waiting(3, 8, ranks=(0, 1)))
    second = rank(1, [*calls(3, (0, 1)), ("barrier", 3, {"ranks": (1, 2), "name": "7"})], **waiting(0, 8, "barrier", ranks=(1, 2), name="7"))
    third = rank(2, [], finished=False)
    assert failures(trace(tmp_path, first, second, third), "turn", patience="60") == []


def test_a_run_that_was_killed_a_few_calls_apart_is_not_stuck(tmp_path: Path) -> None:
    run = trace(tmp_path, rank(0, calls(5, (0, 1)), finished=False), rank(1, calls(3, (0, 1)), finished=False))
    assert failures(run, "turn", patience="10") == []
    assert "count" not in whats(run)


def test_a_timeout_that_was_caught_is_told(tmp_path: Path) -> None:
    gave_up = [*calls(3, (0, 1)), ("all_reduce", 3, {"op": "SUM", "ranks": (0, 1), "flags": 1, "dur": 6 * SECOND})]
    run = trace(tmp_path, rank(0, gave_up), rank(1, calls(3, (0, 1))))
    assert len(failures(run, "turn", patience="10")) == 1


def test_a_backward_of_ddp_counts_as_a_wait(tmp_path: Path) -> None:
    def backwards(n: int) -> list[tuple[Any, ...]]:
        return [("backward", s, {"name": "backward"}) for s in range(n)]

    stuck = rank(0, backwards(5), **waiting(4, 7, "backward", ranks=(0, 1), name="backward"))
    (seen,) = failures(trace(tmp_path, stuck, rank(1, backwards(4))), "turn", patience="10")
    assert seen.startswith("rank 1 stopped issuing collectives after call 4")


def test_a_run_that_lost_records_has_no_count(tmp_path: Path) -> None:
    run = trace(tmp_path, rank(0, STEADY), rank(1, STEADY[:2], dropped=2))
    assert failures(run, "count") == []


def test_a_rank_that_left_no_record_is_not_taken_for_one_that_never_called(tmp_path: Path) -> None:
    alone = trace(tmp_path, rank(0, STEADY, world=2))
    assert failures(alone, "count") == []
    never = trace(tmp_path, rank(0, STEADY), rank(1, []))
    assert failures(never, "count") == ["4 calls of all_reduce on rank 0"]


def test_a_process_that_trains_alone_and_starts_the_ranks_is_none_of_them(tmp_path: Path) -> None:
    """As a notebook or a test does: its rank is 0 as well, of a world of one."""
    starts = rank(0, [], world=1, pid=7)
    run = trace(tmp_path, starts, rank(0, STEADY, world=2), rank(1, STEADY, world=2))
    assert "count" in whats(run)
    assert failures(run, "count") == []
    skips = trace(tmp_path, starts, rank(0, STEADY, world=2), rank(1, STEADY[:3], world=2))
    assert failures(skips, "count") == ["4 calls of all_reduce on rank 0 against 3 calls of all_reduce on rank 1"]


def test_a_rank_that_was_started_again_may_have_called_as_often(tmp_path: Path) -> None:
    run = trace(tmp_path, rank(0, STEADY, world=2), rank(0, STEADY[:1], world=2, pid=7), rank(1, STEADY, world=2))
    assert failures(run, "count") == []


def test_patience_grows_with_the_longest_wait_of_healthy_runs(tmp_path: Path) -> None:
    slow = trace(tmp_path, rank(0, [("barrier", 0, {"dur": 9 * SECOND})] * 3), rank(1, [("barrier", 0)] * 3))
    quick = trace(tmp_path, rank(0, STEADY), rank(1, STEADY))
    both = RELATION.settle(RELATION.merge([RELATION.survey(quick), RELATION.survey(slow)]))
    assert [h.text("patience") for h in both if h["what"] == "turn"] == ["60"]
    assert [h.text("patience") for h in RELATION.propose(quick) if h["what"] == "turn"] == ["10"]


@pytest.mark.parametrize("ranks", [(3,), (0, 1), (0, 1, 2, 3), (1, 3, 5), (0, 1, 5), tuple(range(0, 4096, 8))])
def test_ranks_are_written_and_read(ranks: tuple[int, ...]) -> None:
    assert collective.ranks_of(collective.ranks_text(ranks)) == ranks


@pytest.mark.parametrize("text", ["", "x", '{"fn"', '{"fn":1}', '{"fn":"a","root":"b"}', '{"fn":"a","item":1e400,"root":1.5}', '{"fn":[]}'])
def test_other_texts_are_no_collectives(text: str) -> None:
    assert collective.parse(text) is None


@pytest.mark.parametrize("text", ["a", "1:2", "0:999999999999:1", "5:1:1", "0:9:0", "12 ranks abcd", ""])
def test_damaged_ranks_are_unknown(text: str) -> None:
    assert collective.ranks_of(text) == ()


def test_needs_name_the_functions_and_values() -> None:
    needs = RELATION.needs(Hypothesis.of("agree", what="turn", patience="10"))
    assert needs.values == {"sent"}
    assert needs.functions >= _collectives.FUNCTIONS | _collectives.BACKWARD
