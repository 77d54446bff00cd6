"""What was not recorded is unknown: after an error of ours, and where a function had too many distinct signatures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import polars as pl
import pytest
from helpers.live.flushes import flushes
from helpers.processes import process
from helpers.runs import write_run

from proctor.invariants.codec.signature import features, left_out
from proctor.invariants.condition import ALWAYS
from proctor.invariants.invariant import Hypothesis, Invariant, Severity, Support, invariant_id
from proctor.invariants.pack import Pack
from proctor.invariants.relations import Detail, Examples, Needs, Relation
from proctor.invariants.trace import Trace
from proctor.invariants.verdict import CheckResult
from proctor.verify.checker import check, exit_code
from proctor.verify.coverage import coverage
from proctor.verify.live.online import OnlineChecker

COUNT = "__main__.count"


class Monotone(Relation):
    """The relation that CONTRIBUTING shows: it says nothing of its own about what is left out."""

    name: ClassVar[str] = "monotone"
    code: ClassVar[str] = "PR190"
    wants: ClassVar[Needs] = Needs(functions=frozenset({COUNT}))

    def propose(self, trace: Trace) -> list[Hypothesis]:
        return [Hypothesis.of(self.name, fn=COUNT)]

    def examples(self, trace: Trace, hypotheses: Sequence[Hypothesis]) -> Examples:
        calls = trace.calls.filter(pl.col("fn") == trace.function_code.get(COUNT, -1)).join(trace.contexts.select("ctx", "step"), on="ctx", how="left", maintain_order="left")
        number = pl.Series("_n", [trace.features[c].get("out.value") for c in calls["ret"]], dtype=pl.Int64)
        rows = calls.with_columns(number).drop_nulls("_n").with_columns(passed=(pl.col("_n") >= pl.col("_n").shift(1)).fill_null(value=True))
        frame = rows.select(pl.lit(0, dtype=pl.UInt32).alias("hyp"), "passed", "proc", "step", "seq", "site", "_n")
        return Examples(frame, fields=())

    def needs(self, hypothesis: Hypothesis) -> Needs:
        return self.wants

    def say(self, hypothesis: Hypothesis) -> str:
        return "it never decreases"

    def detail(self, trace: Trace, hypothesis: Hypothesis, example: Mapping[str, Any]) -> Detail:
        return Detail(expected="more", seen=str(example["_n"]))


class OfStates(Monotone):
    wants: ClassVar[Needs] = Needs(states=frozenset({"data"}))


class OfValues(Monotone):
    wants: ClassVar[Needs] = Needs(values=frozenset({"rng"}))


def pack() -> Pack:
    hypothesis = Hypothesis.of("monotone", fn=COUNT)
    support = Support(passed=9, excluded=0, runs=1, programs=1)
    return Pack([Invariant(invariant_id(hypothesis, ALWAYS), hypothesis, ALWAYS, support, "it never decreases")])


def counted(run: Path, numbers: Sequence[Any], **more: Any) -> Path:
    """A program that counts once a step; each number is a result as its signature has it."""
    loop = process(steps=len(numbers))["calls"]
    calls = [{"fn": COUNT, "step": step, "ret": n} for step, n in enumerate(numbers)]
    return write_run(run, processes=[{"rank": 0, "world": 1, "calls": sorted([*loop, *calls], key=lambda c: c["step"]), **more}])


def offline(run: Path, relation: Relation) -> tuple[CheckResult, int]:
    trace = Trace.load([run])
    result = check(trace, [pack()], relations={"monotone": relation})
    return result, exit_code(result, Severity.ERROR, complete=coverage(trace).complete)


def live(run: Path, relation: Relation) -> CheckResult:
    checker = OnlineChecker([pack()], relations={"monotone": relation})
    for name, records, info, reached in flushes(run):
        checker.feed(name, records, info, reached)
    checker.finish()
    return checker.result()


LEFT_OUT = {"e": "int"}


def test_a_reset_that_is_recorded_is_found(tmp_path: Path) -> None:
    run = counted(tmp_path / "run", [1, 2, 3, 0, 1])
    result, code = offline(run, Monotone())
    assert (len(result.violations), code) == (1, 1)
    assert len(live(run, Monotone()).violations) == 1


def test_a_rule_on_numbers_that_are_recorded_no_more_is_unknown(tmp_path: Path) -> None:
    run = counted(tmp_path / "run", [1, 2, 3, LEFT_OUT, LEFT_OUT])
    result, code = offline(run, Monotone())
    assert (result.violations, result.checked, result.unknown, code) == ([], 0, 1, 3)
    assert any(COUNT in note and "numbers from step 3" in note for note in result.notes)
    seen = live(run, Monotone())
    assert (seen.violations, seen.checked, seen.unknown) == ([], 0, 1)


def test_the_numbers_of_a_verdict_are_plain_where_nothing_was_recorded(tmp_path: Path) -> None:
    seen = live(counted(tmp_path / "run", [LEFT_OUT] * 5), Monotone())
    numbers = (seen.checked, seen.unknown, seen.not_triggered)
    assert numbers == (0, 1, 0) and {type(n) for n in numbers} == {int}  # the live view writes them as JSON


def test_a_reset_before_numbers_end_is_still_found(tmp_path: Path) -> None:
    run = counted(tmp_path / "run", [3, 0, 1, 2, 3, LEFT_OUT, LEFT_OUT])
    result, code = offline(run, Monotone())
    assert (len(result.violations), code) == (1, 1)


@pytest.mark.parametrize(("relation", "what"), [(OfStates(), "states"), (OfValues(), "values rng"), (Monotone(), "calls"), (Monotone(), "all")])
def test_rules_that_need_what_an_error_of_ours_ended_are_unknown(relation: Relation, what: str, tmp_path: Path) -> None:
    run = counted(tmp_path / "run", [1, 2, 3, 0, 1], blind=[[what, 3]])
    result, code = offline(run, relation)
    assert (result.violations, result.checked, result.unknown, code) == ([], 0, 1, 3)
    assert any("an error of Proctor's" in note and "step 3" in note for note in result.notes)
    seen = live(run, relation)
    assert (seen.violations, seen.checked, seen.unknown) == ([], 0, 1)


def test_rules_that_need_it_not_are_judged_but_the_verdict_is_not_clean(tmp_path: Path) -> None:
    run = counted(tmp_path / "run", [1, 2, 3, 4], blind=[["states", 1]])
    result, code = offline(run, Monotone())
    assert (result.violations, result.checked, result.unknown, code) == ([], 1, 0, 3)


def test_nonsense_in_place_of_what_ended_is_ignored(tmp_path: Path) -> None:
    run = counted(tmp_path / "run", [1, 2], blind=[["states"], "states", ["states", "x"], None])
    assert Trace.load([run]).processes[0].blind == []


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ('{"a":[{"e":"int"},3,{"T":"float32","s":null}],"k":{"x":{"e":"str"}}}', {"0.value", "2.shape", "x.value"}),
        ('{"a":[{"L":[1,{"e":"float"}],"n":2}],"k":{}}', {"0[1].value"}),
        ('{"e":"many"}', {""}),
        ('{"e":"int"}', {"out.value"}),
        ('{"a":[3,"e",{"T":"float32","s":[]}],"k":{}}', set()),
    ],
)
def test_what_a_signature_does_not_tell(text: str, missing: set[str]) -> None:
    assert left_out(text) == missing


def test_a_tensor_whose_sizes_are_left_out_has_no_dimensions_that_are_made_up() -> None:
    assert "out.ndim" not in features('{"T":"float32","s":null,"d":"cpu"}')
    assert features('{"T":"float32","s":[],"d":"cpu"}')["out.ndim"] == 0


@pytest.mark.parametrize("word", ["3\n", "", "no number", None])
def test_a_process_whose_writer_ended_is_no_clean_one(word: str | None, tmp_path: Path) -> None:
    """`process.json` is as it was before the error; a word beside it, damaged or not, says that the program went on."""
    run = counted(tmp_path / "run", [1, 2, 3, 4])
    (folder,) = (run / "procs").iterdir()
    if word is None:
        (folder / "blind").mkdir()
    else:
        (folder / "blind").write_text(word)
    result, code = offline(run, Monotone())
    assert (result.violations, result.checked, code) == ([], 0, 3)
    assert any("an error of Proctor's" in note for note in result.notes)
