from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from proctor.infer.preconditions import decide
from proctor.infer.preconditions.compress import compress
from proctor.infer.selection.crossval import by_program, by_run, measure, too_often
from proctor.invariants.relations import Examples

Row = tuple[int, bool, str]  # run, passed, value of the only field


def measured(rows: Sequence[Row], programs: Sequence[str], scope: tuple[str, ...] = ()) -> tuple[int, int] | None:
    frame = pl.DataFrame(
        [(0, passed, run, value) for run, passed, value in rows for _ in range(4)],
        schema={"hyp": pl.UInt32, "passed": pl.Boolean, "proc": pl.UInt32, "kind": pl.String},
        orient="row",
    )
    examples = Examples(frame, ("kind",), scope)
    seen = compress(examples)
    return measure(seen, scope, decide(seen, scope), programs, min_support=3).get(0)


def test_a_rule_that_holds_in_every_program_is_tested_on_each() -> None:
    assert measured([(r, True, "a") for r in range(4)], ["p", "q", "r", "s"]) == (4, 0)


def test_a_program_that_breaks_what_the_others_say_is_a_failure() -> None:
    """Without program s the rule is "always", and s breaks it; with s it is "kind is a"."""
    rows = [(r, True, "a") for r in range(4)] + [(3, False, "b")]
    assert measured(rows, ["p", "q", "r", "s"]) == (4, 1)


def test_runs_of_one_program_are_left_out_together() -> None:
    """The other run of program s warns of it, unless it is left out, too."""
    rows = [(r, True, "a") for r in range(5)] + [(3, False, "b"), (4, False, "b")]
    assert measured(rows, ["p", "q", "r", "s", "s"]) == (5, 2)


def test_a_rule_of_one_kind_of_program_is_tested_on_its_runs() -> None:
    rows = [(r, True, "a") for r in range(3)]
    assert measured(rows, ["p", "p", "p"]) == (3, 0)
    own = [(0, True, "a"), (1, True, "a"), (2, True, "a")]
    assert measured(own, ["p", "p", "p", "q", "r"], ("kind",)) == (3, 0)


def test_what_only_one_run_shows_is_not_tested() -> None:
    assert measured([(0, True, "a")], ["p", "q", "r"]) == (0, 0)
    assert measured([(0, True, "a"), (1, True, "a")], ["p", "q"]) == (0, 0)  # too few to leave one out


def test_scope_that_the_others_share_keeps_a_rule_from_applying() -> None:
    rows = [(0, True, "a"), (1, True, "a"), (2, True, "b")]
    assert measured(rows, ["p", "q", "r"], ("kind",)) == (2, 0)  # without r, kind is a; without p or q, anything
    assert measured(rows, ["p", "q", "r"]) == (3, 0)


def test_one_surprise_is_forgiven_and_many_are_not() -> None:
    assert not too_often(3, 1)
    assert too_often(5, 2)
    assert not too_often(30, 3)


def test_folds_keep_programs_together_and_runs_apart() -> None:
    assert by_program(["b", "a", "b"]) == [1, 0, 1]
    assert sorted(by_run(["a", "b", "a"])) == [0, 1, 2]
