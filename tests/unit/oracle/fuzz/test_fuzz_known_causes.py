"""A cause that is known is not looked into again: another placement of the same operator, the same line in another optimizer's file, a hang on another machine; no ranks."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import msgspec
import pytest

from proctor.oracle.fuzz.facts import facts
from proctor.oracle.fuzz.models import template_of
from proctor.oracle.fuzz.running.evaluate import Runner
from proctor.oracle.fuzz.running.outcome import Outcome, Symptom, outcome_of
from proctor.oracle.fuzz.running.worlds import Answer
from proctor.oracle.fuzz.search.attribute import minimal
from proctor.oracle.fuzz.search.campaign import Campaign
from proctor.oracle.fuzz.search.findings import Finding, Known, read_known, toml
from proctor.oracle.fuzz.space import Point
from proctor.oracle.fuzz.spec import Scenario

LISTED = Path(__file__).parents[4] / "oracle/fuzz/known/found-torch-2.13.toml"
HUBER = "F.huber_loss(a, b)"
WRONG = Symptom("inconsistent", "gradient", "scale")


def _operator(setting: Point, expression: str = HUBER) -> tuple[Scenario, frozenset[str]]:
    scenario = Scenario("operator", {"expression": expression}, {}, {"wrapper": "dtensor", **setting})
    return scenario, template_of("operator").code(scenario.model).traits


class Counting:
    """A runner that answers the same to all, and counts."""

    most = 10

    def __init__(self, outcome: Outcome) -> None:
        self.outcome, self.runs = outcome, 0

    def run(self, scenario: Scenario) -> Outcome:
        self.runs += 1
        return self.outcome


def test_an_operator_that_is_known_is_known_however_its_tensors_are_cut() -> None:
    """In a campaign of forty minutes 63 settings of one loss were made small again, each cut in another way: ten minutes."""
    line = Known("huber", "torch", "", "inconsistent", triggers={"world": 2, "wrapper": "dtensor", "dt_a": "S0"}, needs=(HUBER,))
    runner = Counting(Outcome("inconsistent", WRONG, "it differs"))
    campaign = Campaign(cast("Runner", runner), 0, [line])
    square, traits = _operator({"world": 4, "dt_mesh": "square", "dt_a": "S0 S1"})
    assert list(campaign.explain(square, runner.outcome)) == ["huber"] and campaign.counted["huber"] == 1 and runner.runs == 0
    assert not line.passes(square.setting, traits)  # it runs: the entry does not say that it fails


def test_another_operand_another_operator_and_an_earlier_tensor_are_other_findings() -> None:
    known = Known("huber", "torch", "", "inconsistent", triggers={"world": 2, "wrapper": "dtensor", "dt_a": ["S0", "S1"]}, unless={"dt_a": "S1 R"}, what="gradient", needs=(HUBER,), form=2)
    for setting, expression, symptom, told in (
        ({"world": 2, "dt_a": "S1"}, HUBER, WRONG, True),
        ({"world": 4, "dt_mesh": "square", "dt_a": "S1 S1", "dt_b": "S0"}, HUBER, WRONG, True),
        ({"world": 2, "dt_b": "S0"}, HUBER, WRONG, False),  # its first tensor is whole
        ({"world": 4, "dt_mesh": "square", "dt_a": "S1 R"}, HUBER, WRONG, False),  # it says that it does not hold there
        ({"world": 4, "dt_mesh": "square", "dt_a": "S1 S1"}, "F.l1_loss(a, b)", WRONG, False),
        ({"world": 4, "dt_mesh": "square", "dt_a": "S1 S1"}, HUBER, Symptom("inconsistent", "output"), False),  # the loss itself, of which a gradient says nothing
        ({"dt_a": "S0 S1"}, HUBER, WRONG, False),  # one rank
    ):
        scenario, traits = _operator(setting, expression)
        assert known.explains(symptom, scenario.setting, traits, 0) is told, setting


def test_what_a_campaign_finds_of_an_operator_holds_for_its_other_placements() -> None:
    runner = Counting(Outcome("inconsistent", WRONG, "it differs"))
    campaign = Campaign(cast("Runner", runner), 0, [])
    first, _ = _operator({"world": 2, "dt_a": "S0"})
    campaign.findings["x"] = Finding("x", first, runner.outcome, first.setting, (HUBER,), first)
    other, _ = _operator({"world": 4, "dt_mesh": "square", "dt_a": "S1 S0"})
    assert list(campaign.explain(other, runner.outcome)) == ["x"] and campaign.findings["x"].count == 2 and runner.runs == 0


def test_one_line_in_each_optimizers_file_is_one_cause(tmp_path: Path) -> None:
    entry = Known("options", "torch", "lost", "crash", triggers={"groups": "two"}, what="KeyError", way="'betas'", where="torch/optim/*.py:step", form=3)
    two: Point = {"optimizer": "Adamax", "groups": "two"}
    none: frozenset[str] = frozenset()
    assert all(entry.explains(Symptom("crash", "KeyError", "'betas'", f"torch/optim/{name}.py:step"), two, none) for name in ("adamax", "_adafactor"))
    assert not entry.explains(Symptom("crash", "KeyError", "'betas'", "torch/optim/adamax.py:step"), {"optimizer": "Adamax"}, none)  # here a place alone says too little
    for symptom in (
        Symptom("crash", "KeyError", "'lr'", "torch/optim/adamax.py:step"),
        Symptom("crash", "KeyError", "'betas'", "torch/optim/adamax.py:__setstate__"),
        Symptom("crash", "KeyError", "'betas'", "torch/optim/deeper/adamax.py:step"),
        Symptom("hang", "KeyError", "'betas'", "torch/optim/adamax.py:step"),
    ):
        assert not entry.explains(symptom, two, none)
    anywhere = msgspec.structs.replace(entry, where="**")
    assert anywhere.explains(Symptom("crash", "KeyError", "'betas'", "torch/_ops.py:__call__"), two, none) and not anywhere.explains(Symptom("crash", "KeyError", "'lr'", "torch/_ops.py:__call__"), two, none)
    assert entry.broad and entry.passes(two, none)  # its settings run: most models have no empty group
    (tmp_path / "known.toml").write_text(toml([entry]))
    assert read_known(tmp_path / "known.toml", {"torch": "2.13.0"}) == [entry]
    with pytest.raises(ValueError, match=r"a \* in where needs form = 3"):
        msgspec.structs.replace(entry, form=2)


def test_an_entry_may_explain_without_passing_over(tmp_path: Path) -> None:
    entry = Known("mesh", "torch", "why", "inconsistent", triggers={"optimizer": "Adafactor", "wrapper": ["hsdp", "tp_fsdp2"]}, what="parameter", runs=True, form=3)
    assert entry.broad and entry.explains(Symptom("inconsistent", "parameter"), {"optimizer": "Adafactor", "wrapper": "hsdp", "world": 4}, frozenset(), 0)
    assert not msgspec.structs.replace(entry, runs=False).broad
    (tmp_path / "known.toml").write_text(toml([entry]))
    assert read_known(tmp_path / "known.toml", {"torch": "2.13.0"}) == [entry]
    with pytest.raises(ValueError, match="runs needs form = 3"):
        msgspec.structs.replace(entry, form=2)


@pytest.mark.parametrize("file", ["adam", "radam", "_adafactor", "adadelta", "rprop"])
def test_a_flat_state_without_steps_is_in_the_list_whatever_the_optimizer(file: str) -> None:
    listed = read_known(LISTED, {"torch": "2.13.0"})
    symptom = Symptom("crash", "TypeError", "float argument must be a string or a real number, not 'dict'", f"torch/optim/{file}.py:__setstate__")
    assert any(k.explains(symptom, {"optimizer": "RAdam", "resume": "flat"}, frozenset({"sometimes unused"})) for k in listed)


STACK = 'Stack (most recent call first):\n  File "{python}/{inner}", line {line} in {name}\n'
LIBRARY = '  File "{python}/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce\n  File "<scenario>", line 17 in train\n'
IDLE = '  File "/home/{user}/oracle/fuzz/running/rank.py", line {line} in serve\n'


def _hang(*stacks: str) -> Outcome:
    return outcome_of(Answer([None] * len(stacks), "timeout", stacks, 60.0), [])


def test_a_hang_is_the_same_one_on_another_machine() -> None:
    """Its symptom held the path of the interpreter's `socket.py`, in which a rank that has ended waits for its next task."""
    seen = []
    for python, user, line in (("/root/.pyenv/versions/3.11.7/lib/python3.11", "a", 40), ("/usr/lib/python3.12", "b", 44)):
        idle = STACK.format(python=python, inner="socket.py", line=700 + line, name="readinto") + IDLE.format(user=user, line=line)
        waits = STACK.format(python=python, inner="threading.py", line=line, name="wait") + LIBRARY.format(python=python)
        seen.append(_hang(idle, waits))
    assert seen[0].symptom == seen[1].symptom == Symptom("hang", "timeout", "", "ended, torch/distributed/distributed_c10d.py:all_reduce")
    assert seen[0].why == "no answer within 60 s; the ranks wait in torch/distributed/distributed_c10d.py:all_reduce, and others have ended"


def test_a_hang_in_a_program_of_its_own_is_named_by_a_file_and_ours_is_no_library() -> None:
    alone = STACK.format(python="/usr/lib/python3.11", inner="threading.py", line=3, name="wait") + '  File "<scenario>", line 17 in train\n'
    assert _hang(alone).symptom == Symptom("hang", "timeout", "", "threading.py:wait")
    ours = STACK.format(python="/usr/lib/python3.11", inner="socket.py", line=3, name="readinto") + '  File "/venv/site-packages/proctor/oracle/fuzz/running/rank.py", line 40 in serve\n'
    assert _hang(ours).symptom == Symptom("hang", "timeout", "", "ended") and _hang(ours).why.endswith("; all ranks have ended")
    assert _hang("").why.endswith("; the ranks wait in native code")


def test_a_wrapper_and_the_switch_that_it_needs_are_set_back_together() -> None:
    """A model with an unused layer under DDP needs `find_unused_parameters`, and that switch needs DDP: neither could be set back by itself, and the wrapper was told as a trigger."""
    asked: list[Point] = []

    def fails(point: Point) -> bool:
        asked.append(point)
        wrapped, switched = point.get("wrapper") == "ddp", point.get("ddp") == "find_unused_parameters=True"
        return wrapped == switched and {"optimizer": "RAdam", "resume": "flat"}.items() <= point.items()

    found = minimal({"optimizer": "RAdam", "wrapper": "ddp", "ddp": "find_unused_parameters=True", "world": 2, "resume": "flat"}, fails)
    assert found == {"optimizer": "RAdam", "resume": "flat"} and len(asked) <= 12


def test_what_stays_with_its_wrapper_is_asked_of_the_model() -> None:
    """Muon takes matrices alone: without knowing that the model has some, a resume under it looked like no program, and went with the wrapper."""
    setting: Point = {"optimizer": "Muon", "groups": "matrices", "wrapper": "ddp", "ddp": "find_unused_parameters=True", "resume": "flat"}

    def fails(point: Point) -> bool:
        return ("wrapper" in point) == ("ddp" in point) and {"optimizer": "Muon", "groups": "matrices", "resume": "flat"}.items() <= point.items()

    moe = facts(Scenario("moe", {"call": "used"}))
    assert minimal(setting, fails, moe) == {"optimizer": "Muon", "groups": "matrices", "resume": "flat"}


class Under(Counting):
    """Fails under FSDP1 with these optimizers."""

    most = 60

    def run(self, scenario: Scenario) -> Outcome:
        super().run(scenario)
        fails = scenario.setting.get("wrapper") == "fsdp1" and scenario.setting.get("optimizer") in ("Adam", "Adamax", "NAdam", "RAdam")
        return self.outcome if fails else Outcome("ok")


def test_what_fails_for_a_known_reason_once_a_value_is_exchanged_keeps_a_name_of_its_own() -> None:
    """TorchRec's means, taken twice beside a row-wise table, went by the name of a mistake of `data_parallel` sixteen times."""
    known = Known("fsdp1-adam", "torch", "", "inconsistent", triggers={"wrapper": "fsdp1", "optimizer": "Adam"})
    runner = Under(Outcome("inconsistent", Symptom("inconsistent", "parameter"), "it differs"))
    campaign = Campaign(cast("Runner", runner), 0, [known])

    def found(optimizer: str) -> Finding:
        scenario = Scenario("chain", {}, {}, {"world": 2, "wrapper": "fsdp1", "optimizer": optimizer})
        (one,) = campaign.explain(scenario, runner.outcome)
        assert isinstance(one, Finding)
        return one

    assert [(f.triggers["optimizer"], f.perhaps, f.known) for f in map(found, ("Adamax", "NAdam"))] == [("Adamax", "fsdp1-adam", ""), ("NAdam", "fsdp1-adam", "")]
    third = found("RAdam")  # of a cause that shows under every optimizer there would be one for each
    assert (third.triggers["optimizer"], third.perhaps, third.known) == ("Adam", "", "fsdp1-adam")
