"""What a known finding explains, and what it does not; no ranks."""

from __future__ import annotations

from typing import cast

import msgspec

from proctor.oracle.fuzz.running.evaluate import Runner
from proctor.oracle.fuzz.running.judge import Difference
from proctor.oracle.fuzz.running.outcome import Outcome, Symptom
from proctor.oracle.fuzz.search.campaign import Campaign
from proctor.oracle.fuzz.search.findings import Finding, Known
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
    campaign._seen["x"].append(("SGD", ""))
    assert campaign._general("x", {"resume": "full"}) and not campaign._general("x", {"resume": "full", "optimizer": "Adam"})
    assert not campaign._general("x", {"rec_sharding": "column_wise"})
    campaign._seen["x"].append(("Rprop", ""))
    assert campaign._general("x", {"resume": "full", "optimizer": "Adam"})
    campaign._seen["x"].append(("SGD", "row_wise"))
    assert campaign._general("x", {"rec_sharding": "column_wise"})
    assert campaign._general("shipped", {"optimizer": "Adam"})
