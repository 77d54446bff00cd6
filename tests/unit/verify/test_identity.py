"""A rule learned on one script's `__main__.train` is for that function, and for no other of the name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.runs import write_run

from proctor.infer.engine import infer
from proctor.infer.merging import merge_packs
from proctor.invariants.codec.definition import sketch_of
from proctor.invariants.invariant import Invariant
from proctor.invariants.pack import Pack, read_pack, write_pack
from proctor.invariants.relations.contain import EventContain
from proctor.invariants.trace import Trace
from proctor.invariants.verdict import CheckResult
from proctor.verify.checker import check
from proctor.verify.rules import merge_rules

RELATION = EventContain()


def ours(model, loader, optimizer, criterion, device):  # type: ignore[no-untyped-def]
    for batch, target in loader:
        optimizer.zero_grad()
        criterion(model(batch.to(device)), target).backward()
        optimizer.step()
    return evaluate(model)  # type: ignore[name-defined]  # noqa: F821


def repaired(model, loader, optimizer, criterion, device):  # type: ignore[no-untyped-def]
    model.train()
    for batch, target in loader:
        optimizer.zero_grad()
        criterion(model(batch.to(device)), target).backward()
        optimizer.step()
    return evaluate(model)  # type: ignore[name-defined]  # noqa: F821


def theirs(agent, environment, memory, config):  # type: ignore[no-untyped-def]
    while not environment.done:
        state, reward = environment.play(agent.act(environment.state))
        memory.push(state, reward)
    agent.learn(memory.sample(config.batch))


def trace(path: Path, function: Any, *, evaluates: bool = True, program: str = "train.py") -> Trace:
    calls: list[dict[str, Any]] = []
    for step in range(6):
        calls.append({"fn": "__main__.train", "step": step})
        if evaluates:
            calls.append({"fn": "__main__.evaluate", "step": step, "parent": len(calls)})
    said = {} if function is None else {"__main__.train": sketch_of(function)}
    return Trace.load([write_run(path, [{"calls": calls, "definitions": said}], program=program)])


@pytest.fixture
def rules(tmp_path: Path) -> list[Invariant]:
    return infer(trace(tmp_path / "learned", ours), [RELATION], strict=True)[0]


def judge(seen: Trace, rules: list[Invariant]) -> CheckResult:
    return check(seen, [Pack(rules)], relations={"contain": RELATION})


def test_the_same_function_is_judged_and_another_of_its_name_is_not(tmp_path: Path, rules: list[Invariant]) -> None:
    assert rules and all(rule.definitions for rule in rules)
    assert judge(trace(tmp_path / "a", ours, evaluates=False), rules).violations
    assert judge(trace(tmp_path / "b", repaired, evaluates=False), rules).violations
    result = judge(trace(tmp_path / "c", theirs, evaluates=False), rules)
    assert (result.violations, result.checked, result.not_triggered) == ([], 0, len(rules))
    assert any("__main__.train is defined otherwise here" in note for note in result.notes)


def test_what_is_not_known_is_judged_as_before(tmp_path: Path, rules: list[Invariant]) -> None:
    """Traces and packs of earlier versions say nothing of definitions."""
    assert judge(trace(tmp_path / "a", None, evaluates=False), rules).violations
    old = infer(trace(tmp_path / "b", None), [RELATION], strict=True)[0]
    assert old and not any(rule.definitions for rule in old)
    assert judge(trace(tmp_path / "c", theirs, evaluates=False), old).violations


def test_a_name_may_be_what_it_was_in_any_of_the_merged_packs(tmp_path: Path, rules: list[Invariant]) -> None:
    more = infer(trace(tmp_path / "more", theirs), [RELATION], strict=True)[0]
    merged, _ = merge_packs([Pack(rules), Pack(more)])
    write_pack(merged, tmp_path / "p.json")
    for both in (read_pack(tmp_path / "p.json").invariants, merge_rules([Pack(rules), Pack(more)])):
        assert judge(trace(tmp_path / f"a{id(both)}", ours, evaluates=False), both).violations
        assert judge(trace(tmp_path / f"b{id(both)}", theirs, evaluates=False), both).violations
