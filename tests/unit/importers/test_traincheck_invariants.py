"""TrainCheck's invariants as a pack: nothing lost, nothing guessed, nothing run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.traincheck import api, clause, invariant, value, var, when

from proctor.errors import PackError
from proctor.infer.importers.traincheck.parameters import Sources
from proctor.infer.importers.traincheck.rules import convert, import_rules
from proctor.invariants.condition import Condition, Kind
from proctor.invariants.pack import read_pack, write_pack
from proctor.invariants.relations import registry


def test_a_set_of_values_becomes_alternatives() -> None:
    wanted = when(clause("constant", "meta_vars.stage", "init", "training"), clause("constant", "meta_vars.x", None))
    rule = convert(invariant("APIContainRelation", api("m.a"), api("m.b"), precondition=wanted))
    null = Condition("meta_vars.x", Kind.CONSTANT, "null")
    assert rule.precondition.any_of == tuple(
        (Condition("meta_vars.stage", Kind.CONSTANT, json.dumps(s)), null) for s in ("init", "training")
    )


def test_one_record_agrees_with_itself() -> None:
    wanted = when(clause("consistent", "meta_vars.step"), clause("unequal", "process_id"))
    rule = convert(invariant("FunctionLeadRelation", api("m.a"), api("m.b"), precondition=wanted))
    assert {c.kind for c in rule.precondition.any_of[0]} == {Kind.EXIST}
    pair = convert(invariant("ConsistencyRelation", var("data"), var("data"), precondition=wanted))
    assert {c.kind for c in pair.precondition.any_of[0]} == {Kind.CONSISTENT, Kind.UNEQUAL}


def test_both_ways_to_write_an_argument_of_a_context_manager_are_one_field() -> None:
    base = "meta_vars.context_managers.torch.autocast"
    fields = set()
    for field, path in ((base, ["enabled"]), (f"{base}.enabled", ["enabled"]), (f"{base}.enabled", "None")):
        wanted = when(clause("constant", field, True, path=path))
        rule = convert(invariant("APIContainRelation", api("m.a"), api("m.b"), precondition=wanted))
        fields |= rule.precondition.fields
    assert fields == {f"{base}.enabled"}


def test_rules_that_differ_only_in_their_precondition_are_two(tmp_path: Path) -> None:
    file = tmp_path / "rules.json"
    rules = [invariant("APIContainRelation", api("m.a"), api("m.b"), precondition=p) for p in (when(), when(inverted=True), when())]
    file.write_text("\n".join(map(json.dumps, rules)))
    done = import_rules([file])
    assert (done.read, done.twice, len(done.pack.invariants)) == (3, 1, 2)


def test_a_pack_is_read_as_it_was_written(tmp_path: Path) -> None:
    rules = [
        invariant("APIContainRelation", api("m.a"), api("m.b", arguments={"args": {"x": {"int": 1}}, "func_name": "m.b"})),
        invariant("APIContainRelation", api("m.a"), var("grad", pre_value="non_zero", post_value=None)),
        invariant("FunctionCoverRelation", api("m.a"), api("m.b"), api("m.c")),
        invariant("DistinctArgumentRelation", api("m.a"), precondition=when(clause("exist", "process_id"), inverted=True)),
        invariant("ConsistentOutputRelation", api("m.a"), var("dtype", const_value="torch.float32")),
        invariant("ConsistentInputOutputRelation", value(["ndim"], taken=True), api("m.a"), value(["shape", 0], taken=False)),
    ]
    file, out = tmp_path / "rules.json", tmp_path / "pack.json"
    file.write_text(json.dumps(rules))
    done = import_rules([file])
    write_pack(done.pack, out)
    again = read_pack(out, list(registry()))
    assert sorted(again.invariants, key=lambda r: r.id) == sorted(done.pack.invariants, key=lambda r: r.id)
    assert len(again.invariants) == len(rules) and not again.skipped
    assert all(r.text and r.support.passed == 3 for r in again.invariants)


@pytest.mark.parametrize(
    "change",
    [
        {"relation": "VarPeriodicChangeRelation"},
        {"relation": ["x"]},
        {"params": [api("m.a")]},
        {"params": "x"},
        {"params": [{"param_type": "APIParam"}, api("m.b")]},
        {"precondition": None},
        {"precondition": {"parent_func_call_pre": {"preconditions": [{"clauses": [{"type": "odd", "prop_name": "x"}]}]}}},
        {"precondition": {"parent_func_call_pre": {"preconditions": [{"clauses": [{"type": "constant", "prop_name": "x"}]}]}}},
        {"precondition": {"parent_func_call_pre": {"preconditions": "x"}}},
    ],
)
def test_a_rule_that_is_not_understood_is_named_and_the_others_kept(tmp_path: Path, change: dict[str, Any]) -> None:
    good = invariant("APIContainRelation", api("m.a"), api("m.b"))
    file = tmp_path / "rules.json"
    file.write_text(json.dumps(good) + "\n" + json.dumps({**good, **change}))
    done = import_rules([file])
    assert len(done.pack.invariants) == 1
    assert len(done.skipped) == 1 and done.skipped[0].startswith("rules.json, rule 2: ")
    file.write_text(json.dumps({**good, **change}))
    with pytest.raises(PackError, match="no TrainCheck invariant"):
        import_rules([file])


def test_too_many_alternatives_are_refused_not_expanded(tmp_path: Path) -> None:
    many = [clause("constant", f"meta_vars.{i}", *range(10)) for i in range(12)]
    good = invariant("APIContainRelation", api("m.a"), api("m.b"))
    bad = invariant("APIContainRelation", api("m.a"), api("m.b"), precondition=when(*many))
    file = tmp_path / "rules.json"
    file.write_text(json.dumps(good) + "\n" + json.dumps(bad))
    assert "too many clauses" in import_rules([file]).skipped[0]


def test_parameters_are_read_without_running_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "pkg_of_test"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "mod.py").write_text(
        "from dataclasses import dataclass, field\n"
        "raise RuntimeError('imported')\n"
        "def f(a, b=2, *rest, c='x', **more): ...\n"
        "class Base:\n"
        "    def step(self, closure=None): ...\n"
        "    @classmethod\n"
        "    def make(cls, n): ...\n"
        "class Child(Base): ...\n"
        "class lower:\n"
        "    def __init__(self, kind): ...\n"
        "@dataclass\n"
        "class Data:\n"
        "    x: int\n"
        "    y: int = 3\n"
        "    z: int = field(init=False)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = {
        name: [(p, kind) for p, kind, _ in parameters] if (parameters := Sources().parameters(f"pkg_of_test.mod.{name}")) else None
        for name in ("f", "Child.step", "Base.make", "lower.__init__", "Data.__init__", "missing", "Base.missing")
    }
    assert found == {
        "f": [("a", "p"), ("b", "p"), ("rest", "*"), ("c", "k"), ("more", "**")],
        "Child.step": [("self", "p"), ("closure", "p")],
        "Base.make": [("n", "p")],
        "lower.__init__": [("self", "p"), ("kind", "p")],
        "Data.__init__": [("self", "p"), ("x", "p"), ("y", "p")],
        "missing": None,
        "Base.missing": None,
    }
    assert Sources().parameters("../../etc.passwd.f") is None
    assert Sources().parameters("f") is None
