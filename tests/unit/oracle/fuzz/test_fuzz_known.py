"""What a known finding explains, and what it does not; no ranks."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import msgspec
import pytest

from proctor.errors import OracleError
from proctor.oracle.fuzz.running.evaluate import Runner
from proctor.oracle.fuzz.running.judge import Difference
from proctor.oracle.fuzz.running.outcome import Outcome, Symptom
from proctor.oracle.fuzz.search.campaign import Campaign
from proctor.oracle.fuzz.search.findings import Finding, Known, holds, read_known, toml
from proctor.oracle.fuzz.space import Point
from proctor.oracle.fuzz.spec import Scenario


def test_a_known_update_explains_no_gradient_of_the_first_step() -> None:
    none: frozenset[str] = frozenset()
    setting: Point = {"world": 2, "wrapper": "dmp", "rec_sharding": "data_parallel"}
    update = Known("a", "torchrec", "", "inconsistent", triggers={"wrapper": "dmp", "rec_sharding": "data_parallel"}, what="parameter")
    assert update.explains(Symptom("inconsistent", "parameter"), setting, none, 0) and update.explains(Symptom("inconsistent", "evaluation"), setting, none, 0)
    assert not update.explains(Symptom("inconsistent", "gradient"), setting, none, 0)
    assert update.explains(Symptom("inconsistent", "gradient"), setting, none, 1)  # of weights that the first update made
    lost = Known("b", "megatron", "", "inconsistent", triggers={"wrapper": "megatron"}, what="gradient", way="no gradient", needs=("frozen",))
    frozen, of = frozenset({"frozen"}), {**setting, "wrapper": "megatron"}
    assert lost.explains(Symptom("inconsistent", "gradient", "no gradient"), of, frozen, 0)
    assert not lost.explains(Symptom("inconsistent", "gradient", "scale"), of, frozen, 0)
    assert not lost.explains(Symptom("inconsistent", "output"), of, frozen, 0)  # a loss that is wrong in a model that has a frozen layer, too
    assert lost.broad and not update.broad  # a wrapper alone: its settings run all the same
    first = Difference(0, "gradient", "w", 1.0, 1e-8, 1.0, candidate="1", reference="2")
    one = Scenario("chain", {"layers": ["mlp"]}, {}, {"world": 2, "wrapper": "ddp"})
    found = Finding("c", one, Outcome("inconsistent", Symptom("inconsistent", "gradient"), "it differs", first), one.setting, (), one)
    assert found.as_known("torch", "2.13.0").what == "gradient"


def test_a_known_finding_does_not_hold_where_it_says_so() -> None:
    inner = Known("a", "torch", "", "crash", triggers={"wrapper": "fsdp1", "recompute": "reentrant"}, unless={"fsdp1_units": "each"})
    setting: Point = {"world": 2, "wrapper": "fsdp1", "recompute": "reentrant"}
    crash = Symptom("crash", "RuntimeError", "setStorage", "torch/x.py:f")
    assert inner.explains(crash, setting, frozenset()) and inner.passes(setting, frozenset())
    assert not inner.explains(crash, {**setting, "fsdp1_units": "each"}, frozenset())
    several = msgspec.structs.replace(inner, unless={"fsdp1_units": ["each", "others"]})
    assert several.passes(setting, frozenset()) and not several.passes({**setting, "fsdp1_units": "each"}, frozenset())


def test_a_trigger_set_without_an_optimizer_is_not_taken_to_hold_for_all() -> None:
    """What fails without an optimizer's state need not fail with one: seen under SGD alone, Adam is run all the same. So with a sharding type that no trigger set names, since it is the first."""
    campaign = Campaign(cast("Runner", None), 0, [], libraries=("torchrec",))
    campaign._seen["x"].append(campaign._sorts({}))
    assert campaign._general("x", {"resume": "full"}) and not campaign._general("x", {"resume": "full", "optimizer": "Adam"})
    assert not campaign._general("x", {"rec_sharding": "column_wise"})
    campaign._seen["x"].append(campaign._sorts({"optimizer": "Rprop"}))
    assert campaign._general("x", {"resume": "full", "optimizer": "Adam"})
    campaign._seen["x"].append(campaign._sorts({"rec_sharding": "row_wise"}))
    assert campaign._general("x", {"rec_sharding": "column_wise"})
    assert campaign._general("shipped", {"optimizer": "Adam"})


def test_a_trigger_may_be_a_list_of_values() -> None:
    cut = Known("a", "torch", "", "crash", triggers={"wrapper": ["ddp", "zero"], "ddp_hook": "QUANTIZE_PER_TENSOR"}, what="RuntimeError", where="torch/x.py:f", form=2)
    none: frozenset[str] = frozenset()
    for wrapper, told in (("ddp", True), ("zero", True), ("fsdp2", False)):
        assert cut.passes({"world": 2, "wrapper": wrapper, "ddp_hook": "QUANTIZE_PER_TENSOR"}, none) is told
    assert not cut.passes({"world": 2, "wrapper": "zero"}, none)
    assert cut.explains(Symptom("crash", "RuntimeError", "", "torch/x.py:f"), {"wrapper": "none"}, none)  # the same line, wherever it raises
    update = Known("b", "torch", "", "inconsistent", triggers={"wrapper": ["fsdp2", "hsdp"], "optimizer": "Adafactor"}, what="parameter", form=2)
    assert update.explains(Symptom("inconsistent", "parameter"), {"wrapper": "hsdp", "optimizer": "Adafactor"}, none, 0)
    assert not update.explains(Symptom("inconsistent", "parameter"), {"wrapper": "tp", "optimizer": "Adafactor"}, none, 0)
    assert not update.broad and Known("c", "torch", "", "inconsistent", triggers={"wrapper": ["fsdp2", "hsdp"]}, form=2).broad


def test_a_list_of_triggers_may_name_what_an_axis_has_by_itself() -> None:
    """A setting does not write those values down; and numbers of ranks in a list are themselves."""
    stateless: Point = {"resume": "full"}
    parts = {"optimizer": ["SGD", "SparseAdam"], "resume": ["full", "broadcast"]}
    assert holds(parts, stateless) and holds(parts, {"optimizer": "SparseAdam", "resume": "broadcast"})
    assert not holds(parts, {"optimizer": "Adam", "resume": "full"}) and not holds(parts, {"optimizer": "SparseAdam"})
    assert holds({"world": [1, 4]}, {}) and holds({"world": [1, 4]}, {"world": 4}) and not holds({"world": [1, 4]}, {"world": 2})


def test_lists_are_written_and_read_again(tmp_path: Path) -> None:
    several = [
        Known("a", "torch", "why", "crash", ("2.13",), {"wrapper": ["ddp", "zero"], "world": 2, "fsdp1_orig": True}, {"disk": ["save", "flat"]}, "RuntimeError", form=2),
        Known("b", "torch", "why", "crash", ("2.13",), {"wrapper": "ddp"}),
    ]
    (tmp_path / "known.toml").write_text(toml(several))
    assert read_known(tmp_path / "known.toml", {"torch": "2.13.0"}) == several
    assert (tmp_path / "known.toml").read_text().count("form = 2") == 1


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("triggers = { wrapper = [] }\nform = 2", "triggers.wrapper must list one value or more"),
        ('triggers = { wrapper = ["ddp", "ddp"] }\nform = 2', "each of them once"),
        ('triggers = { wrapper = ["ddp", "zero"] }', "needs form = 2"),
        ('triggers = { wrapper = [["ddp"]] }\nform = 2', "got `array`"),
        ("form = 4", "reads up to form 3"),
    ],
)
def test_a_bad_list_of_triggers_is_said(tmp_path: Path, entry: str, said: str) -> None:
    (tmp_path / "known.toml").write_text(f'[[known]]\nid = "x"\nlibrary = "torch"\nreason = "y"\nverdict = "crash"\n{entry}\n')
    with pytest.raises(OracleError, match=r"known\.toml") as raised:
        read_known(tmp_path / "known.toml", {"torch": "2.13.0"})
    assert said in str(raised.value)
