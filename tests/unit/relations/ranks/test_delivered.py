"""`delivered`: what a rank receives is what was sent, and a sum is the sum."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from helpers.runs import write_run

from proctor.invariants.codec import collective
from proctor.invariants.codec.collective import Group
from proctor.invariants.invariant import Hypothesis
from proctor.invariants.relations.delivered import Delivered
from proctor.invariants.trace import Trace

RELATION = Delivered()
COPY, SUM = (Hypothesis.of("delivered", mode=mode, what="collectives") for mode in ("copy", "sum"))
FLOATS = {"dtype": "float32", "shape": "[4]"}
_numbers = itertools.count()


def place(fn: str, **more: Any) -> str:
    return collective.text(fn, Group("0", "0,1"), **more)


def trace(path: Path, *ranks: list[dict[str, Any]], **info: Any) -> Trace:
    """Values of each rank; the call they belong to is the only one."""
    fn = {"fn": "torch.distributed.all_reduce", "site": "train.py:7"}
    processes = [{"rank": i, "world": 2, "calls": [fn], "values": [{"seq": 1, **v} for v in values], **info} for i, values in enumerate(ranks)]
    return Trace.load([write_run(path / f"run{next(_numbers)}", processes)])


def sent(where: str, item: int, fp: int, **more: Any) -> dict[str, Any]:
    return {"kind": "sent", "place": where, "item": item, "fp": fp, "meta": FLOATS, **more}


def piece(kind: str, where: str, item: int, peer: int, dtype: str = "float32", **more: Any) -> dict[str, Any]:
    return {"kind": kind, "place": where, "item": item, "meta": json.dumps({"dtype": dtype, "peer": str(peer)}), **more}


def verdicts(run: Trace, hypothesis: Hypothesis) -> list[bool | None]:
    return RELATION.examples(run, [hypothesis]).frame["passed"].to_list()


def test_a_broadcast_gives_what_its_source_holds(tmp_path: Path) -> None:
    where = place("broadcast", root=1)

    def run(received: int) -> Trace:
        return trace(tmp_path, [sent(where, 0, 5), piece("got", where, 0, 1, fp=received)], [sent(where, 0, 9), piece("got", where, 0, 1, fp=9)])

    assert RELATION.propose(run(9)) == [COPY]
    assert verdicts(run(9), COPY) == [True, True]
    assert sorted(map(bool, verdicts(run(5), COPY))) == [False, True]
    frame = RELATION.examples(run(5), [COPY]).frame
    said = RELATION.detail(run(5), COPY, frame.filter(~frame["passed"]).row(0, named=True))
    assert (said.expected, said.seen) == ("rank 0 holds what rank 1 sent in call 1 of the group of ranks 0,1", "other bits than rank 1 gave to broadcast")


def test_what_is_received_is_what_was_sent_to_this_rank(tmp_path: Path) -> None:
    to_one, from_zero = place("send", peer=1), place("recv", peer=0)
    assert verdicts(trace(tmp_path, [sent(to_one, 3, 7)], [piece("got", from_zero, 3, 0, fp=7)]), COPY) == [True]
    assert verdicts(trace(tmp_path, [sent(to_one, 3, 7)], [piece("got", from_zero, 3, 0, fp=8)]), COPY) == [False]
    each = place("all_to_all")
    given = [piece("given", each, 0, peer, fp=10 + peer) for peer in (0, 1)]
    taken = [piece("given", each, 0, peer, fp=20 + peer) for peer in (0, 1)]
    right = trace(tmp_path, [*given, piece("got", each, 0, 1, fp=20)], [*taken, piece("got", each, 0, 0, fp=11)])
    wrong = trace(tmp_path, [*given, piece("got", each, 0, 1, fp=21)], [*taken, piece("got", each, 0, 0, fp=11)])
    assert verdicts(right, COPY) == [True, True]
    assert verdicts(wrong, COPY) == [False, True]


def summed(path: Path, result: float, op: str = "SUM", dtype: str = "float32", **info: Any) -> Trace:
    where = place("all_reduce", op=op)
    ranks = [
        [piece("given", where, 0, -1, dtype, number=n, norm=4.0), piece("got", where, 0, -1, dtype, number=result, norm=8.0)] for n in (1.5, 2.25)
    ]
    return trace(path, *ranks, **info)


def test_a_sum_is_the_sum_up_to_rounding(tmp_path: Path) -> None:
    assert verdicts(summed(tmp_path, 3.75), SUM) == [True, True]
    assert verdicts(summed(tmp_path, 3.75 + 2e-6), SUM) == [True, True]
    assert verdicts(summed(tmp_path, 3.76), SUM) == [False, False]
    assert verdicts(summed(tmp_path, 1.875, "AVG"), SUM) == [True, True]
    assert verdicts(summed(tmp_path, 3.76, dtype="bfloat16"), SUM) == [True, True], "no digits left to tell"
    assert verdicts(summed(tmp_path, 2.25, "MAX"), SUM) == [], "a maximum is no sum"


def test_what_a_lost_rank_gave_is_not_known(tmp_path: Path) -> None:
    where = place("broadcast", root=1)
    run = trace(tmp_path, [sent(where, 0, 5), piece("got", where, 0, 1, fp=9)], [], dropped=3)
    assert verdicts(run, COPY) == [None]
    where = place("all_reduce", op="SUM")
    half = [piece("given", where, 0, -1, number=1.0, norm=1.0), piece("got", where, 0, -1, number=7.0, norm=7.0)]
    assert verdicts(trace(tmp_path, half, [], dropped=3), SUM) == [None]


def test_a_damaged_meta_says_nothing(tmp_path: Path) -> None:
    where = place("broadcast", root=1)
    bad = {"kind": "got", "place": where, "item": 0, "meta": '{"peer": "x"', "fp": 4}
    assert verdicts(trace(tmp_path, [sent(where, 0, 5), bad], [sent(where, 0, 9)]), COPY) == []
