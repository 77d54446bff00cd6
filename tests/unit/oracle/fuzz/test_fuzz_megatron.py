"""Megatron's axes: which layers take whose place, what is divided, and what they read off the library."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from proctor.oracle.fuzz.axes import all_axes, declared, why_invalid
from proctor.oracle.fuzz.facts import facts
from proctor.oracle.fuzz.models import template_of, templates_for
from proctor.oracle.fuzz.program import program
from proctor.oracle.fuzz.running.judge import Difference
from proctor.oracle.fuzz.running.outcome import Outcome, Symptom
from proctor.oracle.fuzz.search.campaign import Campaign
from proctor.oracle.fuzz.search.findings import Finding
from proctor.oracle.fuzz.sessions.script import script_of
from proctor.oracle.fuzz.space import Point
from proctor.oracle.fuzz.spec import Scenario

CUT: Point = {"world": 2, "wrapper": "megatron"}


def _scenario(template: str = "vocabulary", model: Point | None = None, **more: object) -> Scenario:
    return Scenario(template, model or {}, {"batch": 8}, {**CUT, **more})  # type: ignore[dict-item]


def test_layers_take_the_place_of_those_that_they_cut() -> None:
    text = program(_scenario(mg_style="pairs")).text()
    taken = {line.split("'")[1]: line for line in text.splitlines() if line.strip().startswith("take('")}
    assert "ColumnParallelLinear" in taken["layers.0.0"] and "gather_output" not in taken["layers.0.0"]
    assert "RowParallelLinear" in taken["layers.0.2"] and "input_is_parallel=True" in taken["layers.0.2"]
    assert "VocabParallelEmbedding" in taken["tokens"] and "gather_output" not in taken["head"]  # its output stays cut for the loss
    assert "net.loss = tp.vocab_parallel_cross_entropy" in text
    compile(text, "here", "exec")


def test_rows_are_divided_among_groups_and_gradients_averaged_over_them() -> None:
    text = program(_scenario(world=4, mg_data=2, accumulate=2, mg_ddp="overlap_grad_reduce=True, bucket_size=8")).text()
    assert "tensor_model_parallel_size=world // 2" in text and "tensor_split" not in program(_scenario()).text().partition("rows = ")[2].partition("\n")[0]
    assert "parts = " in text and "tensor_split(2)[rank // (world // 2)]" in text and ".mul(2)" in text
    assert "net.finish_grad_sync()" in text and "net.zero_grad_buffer()" in text and "net.no_sync()" in text
    assert "params_dtype=torch.float32" in program(_scenario(world=4, mg_data=2, precision="float32")).text()


@pytest.mark.parametrize(
    ("model", "more", "said"),
    [
        ({"width": 6, "words": 12}, {"world": 4, "mg_style": "row"}, "must divide"),
        ({}, {"world": 3, "mg_data": 2}, "no such square"),
        ({}, {"mg_style": "pairs", "mg_sequence": True}, "takes all rows"),
        ({}, {"optimizer": "Adafactor"}, "look at the whole"),
        ({}, {"precision": "autocast"}, "autocast of CUDA"),
        ({}, {"mg_ddp": "grad_reduce_in_fp32=True"}, "one group"),
    ],
)
def test_what_the_layers_do_not_say_they_do_is_not_drawn(model: Point, more: Point, said: str) -> None:
    if said == "takes all rows":
        said = "take all rows"
    if "mg_ddp" in more and find_spec("megatron") is None:
        pytest.skip("its switches are read off the library")
    scenario = _scenario("vocabulary", model, **more)
    assert said in why_invalid(scenario.setting, facts(scenario))
    plain = _scenario()
    assert not why_invalid(plain.setting, facts(plain))


def test_a_findings_script_is_short() -> None:
    for model, more in (({"logits": True}, {}), ({"smoothing": 0.1}, {"mg_style": "pairs"})):
        scenario = _scenario("vocabulary", model, **more)
        first = Difference(0, "output", "", 1.0, 1e-8, 1.0, candidate="1", reference="2")
        text = script_of(Finding("x", scenario, Outcome("inconsistent", Symptom("inconsistent", "output"), "", first), scenario.setting, (), scenario), "0.16.1")
        compile(text, "script", "exec")
        assert len(text.splitlines()) < 60, text


def test_what_a_number_of_ranks_divides_is_a_fact_of_the_model() -> None:
    found = facts(Scenario("chain", {"layers": ["mlp"], "width": 5}))
    assert {"pairs", "cut inner by 2", "cut inner by 4", "cut pairs by 2"} <= found and "cut columns by 2" not in found
    assert "cut rows by 3" in facts(Scenario("vocabulary", {"width": 6, "words": 12})) and "pairs" not in facts(Scenario("convolutional"))


def test_models_that_its_layers_do_not_take_are_hardly_drawn() -> None:
    campaign = Campaign(SimpleNamespace(runs=0), 3, [], libraries=("megatron",))  # type: ignore[arg-type]
    drawn = [facts(campaign.drawn(number)) for number in range(0, 100, 5)]
    assert sum("cut columns by 2" in found for found in drawn) >= 18
    assert Campaign(SimpleNamespace(runs=0), 3, []).cover.takes(frozenset())  # type: ignore[arg-type]


def test_the_loss_over_a_cut_vocabulary_is_in_single_precision() -> None:
    scenario = _scenario()
    assert [r.tolerance for r in declared(scenario.setting, facts(scenario))] == [1e-6]


def test_its_campaigns_draw_from_torchs_models_as_well() -> None:
    names = {t.name for t in templates_for(("megatron",))}
    assert {"vocabulary", "chain", "transformer"} <= names and not {"operator", "collective"} & names
    assert "vocabulary" not in {t.name for t in templates_for(("deepspeed",))} and template_of("vocabulary").library == "megatron"


@pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core (docs/fuzz.md, Libraries)")
def test_switches_are_read_off_its_configurations() -> None:
    known = {a.name: a.choice.values for a in all_axes()}
    assert {"grad_reduce_in_fp32=True", "overlap_grad_reduce=True", "gradient_reduce_div_fusion=False"} <= set(known["mg_ddp"])
    assert {"deterministic_mode=True", "async_tensor_model_parallel_allreduce=False"} <= set(known["mg_config"])
