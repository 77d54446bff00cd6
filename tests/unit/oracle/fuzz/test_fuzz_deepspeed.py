"""DeepSpeed's axes: what they write, what they leave out, and what they read off the library."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from proctor.oracle.fuzz.axes import all_axes, declared, why_invalid
from proctor.oracle.fuzz.axes.deepspeed import fields, switches
from proctor.oracle.fuzz.program import first_of, program
from proctor.oracle.fuzz.search.cover import Cover
from proctor.oracle.fuzz.space import Point
from proctor.oracle.fuzz.spec import Scenario

PLAIN = frozenset({"matrix", "trains", "rows 8"})
ENGINE: Point = {"world": 2, "wrapper": "deepspeed", "precision": "float32"}


def _text(**more: object) -> str:
    return program(Scenario("chain", {"layers": ["mlp"]}, {"batch": 8}, {**ENGINE, **more})).text()  # type: ignore[dict-item]


def test_the_engine_takes_in_optimizer_schedule_clipping_and_accumulation() -> None:
    text = _text(ds_stage=2, accumulate=2, clip="2", scheduler="ExponentialLR", optimizer="Adam")
    assert "'gradient_accumulation_steps': 2, 'gradient_clipping': 0.5" in text and "'stage': 2" in text
    assert "lr_scheduler=lambda opt: torch.optim.lr_scheduler.ExponentialLR(opt" in text and "scheduler.step()" not in text
    assert "if not last: opt.step()" in text and ".mul((world*2))" in text
    assert "clip_grad_norm_" not in text and "net.zero_grad()" not in text
    compile(text, "here", "exec")


def test_who_says_which_microbatch_is_the_last_changes_what_is_divided() -> None:
    assert ".mul((world*1))" in _text(accumulate=2, ds_boundary="no_sync") and "'gradient_accumulation_steps': 1" in _text(accumulate=2, ds_boundary="no_sync")
    assert "'managed_gradient_accumulation': False" in _text(accumulate=2, ds_boundary="unmanaged")
    assert "coalesce_grad_reduction()" in _text(accumulate=2, ds_boundary="coalesced", ds_stage=1)


def test_optimizers_by_the_configuration_are_those_of_torch() -> None:
    text = _text(ds_optimizer="config", optimizer="Adam", option="weight_decay=0.1")
    assert "'optimizer': {'type': 'Adam', 'params': {'lr': 0.1, 'weight_decay': 0.1, 'torch_adam': True, 'adam_w_mode': False}}" in text
    assert "model_parameters=net.parameters()" in text and "torch.optim.Adam(" not in text


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"clip": "inf"}, "one norm"),
        ({"precision": "float64"}, "regimes"),
        ({"ds_stage": 1, "optimizer": "Adafactor"}, "look at the whole"),
        ({"ds_stage": 2, "ds_boundary": "no_sync"}, "stages 0 and 1"),
        ({"ds_look": True}, "nothing is cut"),
        ({"ds_stage": 2, "ds_config": "'prescale_gradients': True"}, "reduce_scatter=False"),
        ({"ds_state": "universal"}, "of ZeRO"),
        ({"ds_stage": 3, "ds_init": True, "groups": "two"}, "no dimensions"),
        ({"ds_stage": 1, "clip": "2", "groups": "matrices"}, "that the optimizer has"),
    ],
)
def test_what_the_library_does_not_say_it_does_is_not_drawn(more: Point, said: str) -> None:
    assert said in why_invalid({**ENGINE, **more}, PLAIN)
    assert not why_invalid({**ENGINE, "ds_stage": 1}, PLAIN)


def test_gradients_of_zeros_are_declared_for_optimizers_that_count_them() -> None:
    unused = PLAIN | {"unused"}
    assert [r.effect for r in declared({**ENGINE, "optimizer": "Adam"}, unused)] == ["different"]
    assert not declared(ENGINE, unused) and not declared({**ENGINE, "optimizer": "Adam"}, PLAIN)


def test_a_universal_checkpoint_may_be_saved_by_another_number_of_ranks() -> None:
    scenario = Scenario("chain", {"layers": ["mlp"]}, {"batch": 8}, {**ENGINE, "optimizer": "Adam", "ds_stage": 3, "ds_state": "universal", "before_world": 3})
    first = first_of(scenario)
    assert first is not None and first.setting == {"world": 3, "wrapper": "deepspeed", "precision": "float32", "optimizer": "Adam", "ds_stage": 3, "ds_state": "universal"}
    saves, goes_on = program(first, life=1).text(), program(scenario).text()
    assert "ds_to_universal.main(" in saves and "load_checkpoint" not in saves
    assert "tag='universal'" in goes_on and "save_checkpoint" not in goes_on and "step < 1: continue" in goes_on


def test_programs_are_drawn_in_a_precision_that_the_engine_has() -> None:
    import random

    cover = Cover(("deepspeed",))
    drawn = {str(p.get("precision")) for n in range(40) for p in cover.programs(random.Random(n), PLAIN, 4)}
    assert drawn == {"float32", "autocast"}


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed (docs/fuzz.md, Libraries)")
def test_switches_of_zero_are_read_off_its_configuration() -> None:
    known = {a.name: a for a in all_axes()}["ds_zero"].choice.values
    assert {"'overlap_comm': True", "'round_robin_gradients': True", "'contiguous_gradients': False", "'offload_optimizer': {'device': 'cpu'}"} <= set(switches()) < set(known)
    assert fields()["param_persistence_threshold"][1] and not fields()["reduce_scatter"][1]
    assert not {"cpu_offload", "stage3_gather_fp16_weights_on_model_save"} & set(fields())  # deprecated
    assert "of stage 3" in why_invalid({**ENGINE, "ds_stage": 2, "ds_zero": "'max_live_parameters': 0"}, PLAIN)
