"""`recomputed`: the second pass of a checkpointed function gives what the first gave."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from helpers.runs import write_run

from proctor.invariants.invariant import Hypothesis
from proctor.invariants.relations.recomputed import Recomputed
from proctor.invariants.trace import Trace

RELATION = Recomputed()
RULE = Hypothesis.of("recomputed", mode="same", what="recomputation")
DROPOUT, LINEAR = "torch.nn.functional.dropout", "torch.nn.functional.linear"
_numbers = itertools.count()


def trace(path: Path, *rows: tuple[str, str, int, int], **info: Any) -> Trace:
    """Rows of one process: kind, function, fingerprint, step."""
    values = [
        {"kind": kind, "seq": 1 + i, "place": fn, "fp": fp, "step": step, "meta": {"dtype": "float32", "shape": "[4]"}}
        for i, (kind, fn, fp, step) in enumerate(rows)
    ]
    calls = [{"fn": fn, "step": step, "site": "train.py:9"} for _, fn, _, step in rows]
    return Trace.load([write_run(path / f"run{next(_numbers)}", [{"calls": calls, "values": values, **info}])])


def verdicts(run: Trace) -> list[bool | None]:
    return RELATION.examples(run, [RULE]).frame["passed"].to_list()


def test_the_same_results_in_any_order_hold(tmp_path: Path) -> None:
    run = trace(tmp_path, ("first", DROPOUT, 5, 0), ("first", DROPOUT, 6, 0), ("again", DROPOUT, 6, 0), ("again", DROPOUT, 5, 0))
    assert RELATION.propose(run) == [RULE]
    assert verdicts(run) == [True]


def test_another_mask_fails_and_is_said_to_be_random(tmp_path: Path) -> None:
    run = trace(tmp_path, ("first", LINEAR, 5, 0), ("first", DROPOUT, 6, 0), ("again", LINEAR, 5, 0), ("again", DROPOUT, 7, 0))
    assert RELATION.propose(run) == []
    row = RELATION.examples(run, [RULE]).frame.row(0, named=True)
    said = RELATION.detail(run, RULE, row)
    assert (row["passed"], said.function) == (False, DROPOUT)
    assert said.seen == f"1 of 2 results of the second pass were not in the first, first that of {DROPOUT}: other random numbers"
    assert "preserve_rng_state" in said.advice


def test_a_result_of_the_step_before_counts_and_one_of_an_earlier_step_does_not(tmp_path: Path) -> None:
    first = [("first", DROPOUT, 5 + step, step) for step in range(3)]
    pipelined = trace(tmp_path, *first, ("again", DROPOUT, 5, 1), ("again", DROPOUT, 6, 2))
    assert verdicts(pipelined) == [True, True]
    assert verdicts(trace(tmp_path, *first, ("again", DROPOUT, 5, 2))) == [False]


def test_without_a_record_of_the_first_pass_nothing_is_known(tmp_path: Path) -> None:
    assert verdicts(trace(tmp_path, ("again", DROPOUT, 5, 0))) == [None]
    lossy = trace(tmp_path, ("first", DROPOUT, 6, 0), ("again", DROPOUT, 5, 0), dropped=2)
    assert verdicts(lossy) == [None]
    full = trace(tmp_path, *[("first", DROPOUT, 10 + i, 0) for i in range(512)], ("again", DROPOUT, 5, 0))
    assert verdicts(full) == [None]
