"""`scalar`: numbers of a training program fit together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.loops import STEP, details, holds, learn, load, violations

from proctor.invariants.relations.scalar import Scalar, formulas

RELATION = Scalar()
TOTAL = ["*", "epochs", ["ceil", ["/", "len(loader)", "accum"]]]
FN = "minilib.Trainer.train"


def program(
    numbers: dict[str, float],
    *,
    made: dict[str, list[Any]] | None = None,
    through: str = "",
    fn: str = FN,
    model: str = "__main__.Net",
    steps: int = 4,
    **process: Any,
) -> dict[str, Any]:
    """One process whose updates see these numbers; `made` are formulas by target."""
    var = {"model": model, "name": "fc.weight", "attr": "data", "module": "torch.nn.Linear"}
    calls = [{"fn": STEP, "step": step, "site": "train.py:9"} for step in range(steps)]
    values = []
    for step in range(steps):
        for name, number in numbers.items():
            facts = {"formula": json.dumps(made[name])} if made and name in made else {}
            if through and name == "total":
                facts["through"] = through
            meta = facts or ""
            values.append({"kind": "number", "seq": step + 1, "place": f"{fn}:{name}", "number": number, "step": step, "meta": meta})
    states = [{"var": var, "step": 0, "fp": 1}]
    return {"calls": calls, "states": states, "values": values, **process}


def healthy(tmp_path: Path, **more: Any) -> Any:
    made = {"total": [TOTAL]}
    return load(
        tmp_path,
        [program({"total": 12, "epochs": 3, "len(loader)": 8, "accum": 2}, made=made, **more)],
        [program({"total": 14, "epochs": 2, "len(loader)": 7, "accum": 1}, made=made, model="lib.Other", **more)],
    )


def test_a_total_from_the_wrong_counts_is_found_and_named(tmp_path: Path) -> None:
    rules = learn(RELATION, healthy(tmp_path))
    assert [r.text for r in rules] == ["total in Trainer.train equals epochs * ceil(len(loader) / accum)"]
    wrong = [["*", "epochs", ["//", "len(loader)", "accum"]]]
    buggy = load(tmp_path, [program({"total": 8, "epochs": 4, "len(loader)": 5, "accum": 2}, made={"total": wrong}, model="lib.Third")])
    (found,) = details(RELATION, rules, buggy)
    assert (found.function, found.variable, found.seen) == (FN, "total", "total is 8")
    assert found.expected.endswith("= 12")


def test_other_sizes_are_fine_also_where_the_source_says_it_otherwise(tmp_path: Path) -> None:
    rules = learn(RELATION, healthy(tmp_path))
    trace = load(tmp_path, [program({"total": 300, "epochs": 10, "len(loader)": 90, "accum": 3}, model="lib.Third")])
    assert not violations(RELATION, rules, trace)
    assert holds(RELATION, rules, trace) == 4


def test_a_number_without_its_operands_is_unknown(tmp_path: Path) -> None:
    rules = learn(RELATION, healthy(tmp_path))
    trace = load(tmp_path, [program({"total": 8, "epochs": 4, "accum": 2})])
    frame = RELATION.examples(trace, [r.hypothesis for r in rules]).frame
    assert frame.height == 4 and frame["passed"].null_count() == 4


def test_a_formula_that_failed_once_is_no_rule(tmp_path: Path) -> None:
    made = {"total": [TOTAL]}
    trace = load(
        tmp_path,
        [program({"total": 12, "epochs": 3, "len(loader)": 8, "accum": 2}, made=made)],
        [program({"total": 13, "epochs": 3, "len(loader)": 8, "accum": 2}, made=made)],
    )
    assert not learn(RELATION, trace)


def test_alternatives_of_several_runs_all_count(tmp_path: Path) -> None:
    trace = load(
        tmp_path,
        [program({"total": 12, "epochs": 3, "steps": 4, "limit": -1}, made={"total": [["*", "epochs", "steps"]]})],
        [program({"total": 5, "epochs": 3, "steps": 4, "limit": 5}, made={"total": ["limit"]}, model="lib.Other")],
    )
    rules = learn(RELATION, trace)
    assert len(rules) == 1
    fine = load(tmp_path, [program({"total": 7, "epochs": 1, "steps": 9, "limit": 7}, model="lib.Third")])
    wrong = load(tmp_path, [program({"total": 8, "epochs": 1, "steps": 9, "limit": 7}, model="lib.Third")])
    assert not violations(RELATION, rules, fine)
    assert violations(RELATION, rules, wrong)


def test_a_script_of_another_kind_has_numbers_of_its_own(tmp_path: Path) -> None:
    rules = learn(RELATION, healthy(tmp_path, fn="__main__.train"))
    other = program({"total": 8, "epochs": 4, "len(loader)": 5, "accum": 2}, fn="__main__.train", model="__main__.Third")
    trace = load(tmp_path, [other])
    assert rules and not violations(RELATION, rules, trace) and not holds(RELATION, rules, trace)


def test_a_method_that_another_program_overrides_is_another_formula(tmp_path: Path) -> None:
    rules = learn(RELATION, healthy(tmp_path, through="minilib.Trainer.count"))
    numbers = {"total": 8.0, "epochs": 4.0, "len(loader)": 5.0, "accum": 2.0}
    own = load(tmp_path, [program(numbers, through="__main__.Mine.count", model="lib.Third")])
    same = load(tmp_path, [program(numbers, through="minilib.Trainer.count", model="lib.Third")])
    assert not violations(RELATION, rules, own)
    assert violations(RELATION, rules, same)


def test_losses_are_compared_in_single_precision_and_counts_exactly(tmp_path: Path) -> None:
    made = {"loss": [["/", "loss()", "accum"]], "total": [["*", "a", "b"]]}
    rules = learn(RELATION, load(tmp_path, [program({"loss": 0.5, "loss()": 1, "accum": 2, "total": 4, "a": 2, "b": 2}, made=made)]))
    near = {"loss": 0.3333333, "loss()": 1, "accum": 3, "total": 1_000_000, "a": 1000, "b": 1000}
    assert not violations(RELATION, rules, load(tmp_path, [program(near)]))
    assert len(violations(RELATION, rules, load(tmp_path, [program({**near, "loss": 1.0})]))) == 1
    assert len(violations(RELATION, rules, load(tmp_path, [program({**near, "total": 1_000_001})]))) == 1
    assert not violations(RELATION, rules, load(tmp_path, [program({**near, "loss": float("nan")})]))


def test_what_must_be_recorded(tmp_path: Path) -> None:
    made = {"loss": [["/", "loss()", "accum"]]}
    (rule,) = learn(RELATION, load(tmp_path, [program({"loss": 0.5, "loss()": 1, "accum": 2}, made=made)]))
    needs = RELATION.needs(rule.hypothesis)
    assert STEP in needs.functions and "torch.nn.functional.cross_entropy" in needs.functions
    assert needs.values == {"number"}


@pytest.mark.parametrize(
    "text", ["", "{", "7", '[["exec","a"]]', '[["+","a"]]', '[[]]', '[null]', "[" * 5000, json.dumps([["+", "a", "b"] * 60])]
)  # fmt: skip
def test_text_that_is_no_list_of_formulas_is_none(text: str) -> None:
    assert formulas.parse(text) == ()


@pytest.mark.parametrize(
    ("tree", "expected", "said"),
    [
        (["//", "a", "b"], [2, 3], "a // b"),
        (["*", ["+", "a", 1], "b"], [24, 24], "(a + 1) * b"),
        (["-", "a", ["-", "b", 1]], [5, 8], "a - (b - 1)"),
        (["neg", ["//", ["neg", "a"], "b"]], [3, 4], "-(-a // b)"),
        (["if", [">", "a", 8], "b", "a"], [7, 3], "(b if a > 8 else a)"),
        (["or", "zero", "b"], [3, 3], "zero or b"),
        (["max", ["int", ["/", "a", "b"]], 3], [3, 3], "max(int(a / b), 3)"),
        (["/", "a", "zero"], [np.nan, np.nan], "a / zero"),
    ],
)
def test_formulas_are_evaluated_and_said(tree: Any, expected: list[float], said: str) -> None:
    (formula,) = formulas.parse(json.dumps([tree]))
    columns = {"a": np.array([7.0, 11.0]), "b": np.array([3.0, 3.0]), "zero": np.zeros(2)}
    if tree[0] in ("*",):
        columns = {"a": np.array([7.0, 7.0]), "b": np.array([3.0, 3.0])}
    if tree[0] == "-":
        columns = {"a": np.array([7.0, 10.0]), "b": np.array([3.0, 3.0])}
    np.testing.assert_array_equal(formulas.evaluate(formula, columns), expected)
    assert formulas.words(formula) == said
