"""Spaces, specs, templates and axes: what is drawn is valid, is JSON, gets simpler, and is a program that runs."""

from __future__ import annotations

import random
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest
import torch

from proctor.errors import OracleError
from proctor.oracle.fuzz.axes import all_axes, declared, why_invalid
from proctor.oracle.fuzz.axes import program_of as program_of_setting
from proctor.oracle.fuzz.axes.accelerate import _passed_on
from proctor.oracle.fuzz.axes.optimizer import arguments, options
from proctor.oracle.fuzz.facts import facts
from proctor.oracle.fuzz.models import all_templates
from proctor.oracle.fuzz.program import first_of, model_code, program, reference_of
from proctor.oracle.fuzz.running.outcome import Symptom, refusals
from proctor.oracle.fuzz.running.rank import program_of
from proctor.oracle.fuzz.search.cover import Cover, pairs
from proctor.oracle.fuzz.search.findings import needs, signature
from proctor.oracle.fuzz.search.shrink import steps
from proctor.oracle.fuzz.space import Choice, Point, drawn, simpler
from proctor.oracle.fuzz.spec import INPUT, Scenario, decode, encode, read

TEMPLATES = [t.name for t in all_templates("torch")]


def a_scenario(template: str, seed: int, setting: dict[str, object] | None = None) -> Scenario:
    found = next(t for t in all_templates() if t.name == template)
    rng = random.Random(seed)
    return Scenario(template, drawn(found.choices, rng), drawn(INPUT, rng), setting or {})  # type: ignore[arg-type]


def test_neutral_values_are_left_out_and_simpler_points_have_fewer() -> None:
    choices = (Choice("a", (1, 2, 3)), Choice("b", ("x", "y"), most=3))
    point = {"a": 3, "b": ["y", "x"]}
    found = list(simpler(choices, point))
    assert found[0] == {}
    assert {"b": ["y", "x"]} in found and {"a": 3, "b": ["y"]} in found and {"a": 3} in found
    assert all(p != point for p in found)


def test_true_is_not_one() -> None:
    assert not Choice("a", (1, 2)).holds(True)
    assert not Choice("a", (False, True)).holds(1)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_scenario_survives_json(template: str) -> None:
    for seed in range(5):
        scenario = a_scenario(template, seed, {"world": 2, "wrapper": "ddp", "optimizer": "Adam"})
        assert decode(encode(scenario), "here") == scenario
        assert decode(encode(scenario), "here").key() == scenario.key()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"template": "castle"}, "no template"),
        ({"model": {"towers": 3}}, "there is no 'towers'"),
        ({"setting": {"world": 2000}}, "world is 2000"),
        ({"setting": {"optimizer": "__import__('os')"}}, "optimizer is"),
        ({"version": 99}, "version 99"),
        ({"input": {"batch": "2; import os"}}, "batch is"),
    ],
)
def test_a_file_can_say_nothing_but_a_point_of_our_spaces(tmp_path: Path, change: dict[str, object], said: str) -> None:
    plain = {"template": "chain", "model": {}, "input": {}, "setting": {}, "version": 1, **change}
    file = tmp_path / "scenario.json"
    file.write_bytes(msgspec.json.encode(plain))
    with pytest.raises(OracleError, match=said):
        read(file)


def test_a_file_that_is_no_json_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "scenario.json"
    file.write_bytes(b"\xff\x00 not json")
    with pytest.raises(OracleError, match="no scenario"):
        read(file)
    with pytest.raises(OracleError, match="No such file"):
        read(tmp_path / "none.json")


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_template_makes_programs_that_train(template: str) -> None:
    trained = 0
    for seed in range(12):
        scenario = reference_of(a_scenario(template, seed))
        try:
            moments = [m for m, *_ in program_of(program(scenario).codes())["train"](0, 1)]
        except (RuntimeError, ValueError, IndexError) as e:  # nothing to train: all frozen, or a chain of functions without parameters
            # Some expressions ask for an even width or a second row; some reductions are none of a type.
            if template not in ("operator", "collective") and not ("does not require grad" in str(e) or "empty parameter list" in str(e)):
                raise
            continue
        assert moments[-1] == "evaluation" and moments.count("update") == scenario.given("steps")
        trained += 1
    assert trained >= 8


def test_parameters_come_from_names_and_are_not_trivial() -> None:
    make = program_of(program(Scenario("transformer", {"tied": True})).codes())["make"]
    one, two = make(), make()
    for (name, a), (_, b) in zip(one.named_parameters(), two.named_parameters(), strict=True):
        assert torch.equal(a, b), name
        assert a.dtype == torch.float64
        assert a.unique().numel() > 1, name
    assert one.head.weight is one.tokens.weight


def test_axes_are_read_off_the_library() -> None:
    known = {a.name: a for a in all_axes()}
    classes = {n for n, c in vars(torch.optim).items() if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)} - {"Optimizer"}
    assert set(known["optimizer"].choice.values) == classes == set(arguments())
    assert {"amsgrad=True", "nesterov=True", "line_search_fn='strong_wolfe'"} <= set(options())
    assert {"static_graph=True", "gradient_as_bucket_view=True"} <= set(known["ddp"].choice.values)
    assert "set_reshard_after_forward(False)" in known["fsdp_set"].choice.values
    assert {"ALLREDUCE", "POWER_SGD"} <= set(known["ddp_hook"].choice.values)


def test_every_axis_writes_something_that_compiles() -> None:
    plain = frozenset({"matrix", "numbers", "wholly cut", "sequence", *(f"divides by {n}" for n in (2, 3, 4))})
    for axis in all_axes():
        if axis.library == "keras" or find_spec(axis.library) is None:  # Keras has a test of its own
            continue
        own = {"torchrec": ("torchrec", frozenset({"torchrec"})), "transformers": ("causal", frozenset({"transformers"})), "megatron": ("chain", plain | {"pairs", *(f"cut {side} by {n}" for side in ("columns", "rows", "pairs", "inner") for n in (2, 4))})}
        template, *kinds = own.get(axis.library, ("transformer", plain, plain | {"sparse"}))
        if axis.name.startswith("dt_"):
            template, kinds = "operator", [frozenset({"operator", "classes", "tensor a", "tensor b"})]
        if axis.name.startswith("hand_"):
            template, kinds = "collective", [frozenset({"collective", *more}) for more in ((), ("complex values",))]
        if axis.name == "exchange_call":
            template, kinds = "exchange", [frozenset({"exchange"})]
        if axis.name.startswith("pipe_"):
            template, kinds = "chain", [plain | {"pipeline of 8", "rows 8"}]
        layers = axis.name.startswith(("pipe_", "mg_"))
        for value in axis.choice.values[1:]:
            if value in ("dmp", "dtensor", "by_hand", "exchange", "accelerate", "pipeline", "megatron", "mirrored", "trainer", "spmd") or (axis.name == "acc_ddp" and str(value).partition("=")[0] not in _passed_on()):
                continue
            found = next((s for traits in kinds for s in _settings_with(axis.name, value) if not why_invalid(s, traits)), None)
            assert found is not None, (axis.name, value)
            model: Point = {"layers": ["linear", "mlp"] * 4} if layers else {}
            texts = _texts(Scenario(template, model, {}, found))
            for text in texts:
                compile(text, "here", "exec")
            assert texts != _texts(Scenario(template, model, {}, {k: v for k, v in found.items() if k != axis.name})) or "world" in axis.name


def _texts(scenario: Scenario) -> list[str]:
    first = first_of(scenario)
    return [program(scenario).text(), *([program(first, life=1).text()] if first is not None else [])]


def _settings_with(name: str, value: object) -> list[dict[str, object]]:
    bases: list[dict[str, object]] = [{}, {"world": 2, "wrapper": "ddp"}, {"world": 2, "wrapper": "fsdp2"}, {"world": 2, "wrapper": "zero"}, {"world": 2, "wrapper": "tp"},
                                      {"world": 4, "wrapper": "fsdp2"}, {"world": 2, "wrapper": "dmp", "precision": "float32"}, {"precision": "float32"},
                                      {"world": 2, "wrapper": "fsdp1"}, {"world": 4, "wrapper": "fsdp1"}, {"world": 2, "wrapper": "pipeline"}, {"world": 2, "wrapper": "pipeline", "pipe_micro": "two a rank"}, {"world": 2, "wrapper": "accelerate"}, {"world": 2, "wrapper": "accelerate", "acc_rows": "loader"}, {"wrapper": "trainer"}, {"wrapper": "trainer", "hf_loss": "tokens"}, {"world": 2, "wrapper": "accelerate", "acc_plugin": "fsdp2"}, {"world": 2, "wrapper": "accelerate", "acc_plugin": "fsdp2", "acc_state": True}, {"world": 2, "wrapper": "dtensor"}, {"world": 2, "wrapper": "dtensor", "dt_a": "S1"}, {"world": 4, "wrapper": "dtensor", "dt_mesh": "square"},
                                      {"world": 2, "wrapper": "by_hand"}, {"world": 2, "wrapper": "by_hand", "hand_call": "all_reduce"}, {"world": 2, "wrapper": "exchange"}, {"world": 2, "wrapper": "ddp", "ddp": "find_unused_parameters=True"}]
    bases += [{"world": 4, "wrapper": "hsdp"}, {"world": 4, "wrapper": "spmd"}, {"world": 2, "wrapper": "fsdp2", "fsdp_units": "each"}]
    bases += [{"world": 4, "wrapper": "megatron", "mg_style": "pairs"}, {"world": 4, "wrapper": "megatron", "mg_data": 2}]
    bases += [{"world": 2, "wrapper": "deepspeed", "precision": "float32", "ds_stage": stage} for stage in range(4)]
    extra: list[dict[str, object]] = [{}, {"disk": "save"}, {"disk": "save", "before_world": 1}, {"disk": "save", "before_world": 4}, {"groups": "matrices"}, {"accumulate": 2}, {"clip": "2"}, {"world": 4}]
    extra += [{"optimizer": o, **g} for o in arguments() for g in ({}, {"groups": "matrices"}, {"groups": "bags"})]
    return [{**b, **e, name: value} for b in bases for e in extra]


def test_a_checkpoint_of_another_program_is_saved_by_a_first_life() -> None:
    setting: dict[str, object] = {"world": 3, "wrapper": "fsdp2", "optimizer": "Adam", "scheduler": "OneCycleLR", "disk": "save", "before": "ddp", "before_world": 2}
    scenario = Scenario("chain", {"layers": ["mlp"]}, {"batch": 6, "steps": 3}, setting)  # type: ignore[arg-type]
    first = first_of(scenario)
    assert first is not None and first.setting == {"world": 2, "wrapper": "ddp", "optimizer": "Adam", "scheduler": "OneCycleLR", "disk": "save"}
    saves, goes_on = program(first, life=1).text(), program(scenario).text()
    assert "range(1)" in saves and "dcp.save(" in saves and "dcp.load(" not in saves and "eval()" not in saves and "DDP(" in saves
    assert "step < 1: continue" in goes_on and "dcp.load(" in goes_on and "dcp.save(" not in goes_on and "scheduler.load_state_dict" in goes_on
    alone = scenario.with_setting({k: v for k, v in scenario.setting.items() if not k.startswith("before")})
    assert first_of(alone) is None and "dcp.save(" in program(alone).text() and "dcp.load(" in program(alone).text()
    traits = facts(scenario)
    assert not why_invalid(scenario.setting, traits)
    for more, said in (({"before": "fsdp2", "before_world": 3}, "same program"), ({"before": "none"}, "nothing to distribute"), ({"disk": "no"}, "goes to the disk"),
                       ({"before": "hsdp", "before_world": 2}, "four ranks"), ({"resume": "full"}, "resumed already")):
        point = {k: v for k, v in {**setting, **more}.items() if v != "no"}
        assert said in why_invalid(point, traits), more  # type: ignore[arg-type]


def test_a_pipelines_stages_are_the_layers_of_a_chain_and_each_has_parameters() -> None:
    layers = ["relu", "linear", "gelu", "mlp", "rmsnorm"]
    scenario = Scenario("chain", {"layers": layers}, {"batch": 8}, {"world": 3, "wrapper": "pipeline"})  # type: ignore[dict-item]
    assert [[int(x.partition("[")[2][:-1]) for x in part] for part in model_code(scenario).stages] == [[0, 1, 2], [3], [4]]
    assert "pipeline of 3" in facts(scenario) and "rows alike" in why_invalid(scenario.setting, facts(scenario))
    assert not why_invalid({"world": 2, "wrapper": "pipeline"}, facts(scenario))
    assert "no chain" in why_invalid({"world": 2, "wrapper": "pipeline", "pipe_schedule": "ScheduleLoopedBFS"}, facts(scenario))
    assert "no chain" in why_invalid({"world": 2, "wrapper": "pipeline"}, facts(Scenario("chain", {"layers": layers, "skip": "all"}, {"batch": 8})))  # type: ignore[dict-item]
    known = {a.name: a for a in all_axes()}
    assert {"Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"} <= set(known["pipe_schedule"].choice.values)


def test_what_is_not_allowed_does_not_come_back_as_a_repair() -> None:
    cover, traits = Cover(only={"disk": (), "compile": ()}), facts(Scenario("chain", {"layers": ["mlp"]}, {"batch": 8}))
    rows = [cover.row(random.Random(n), traits) for n in range(60)]
    assert not [r for r in rows if {"disk", "disk_switch", "before", "before_world", "compile"} & set(r)] and len({str(r) for r in rows}) > 40


def test_what_was_told_falsely_is_declared_or_no_program() -> None:
    scenario = Scenario("chain", {}, {"batch": 8}, {"world": 2, "wrapper": "ddp", "implementation": "lr=tensor", "disk": "save", "before_world": 1})
    first = first_of(scenario)
    assert first is not None and first.setting["implementation"] == "lr=tensor"  # what is saved is of the same type as what it is loaded into
    stack = facts(Scenario("stack", {"layers": ["linear"] * 4}, {"batch": 8}))  # type: ignore[dict-item]
    assert why_invalid({"world": 2, "wrapper": "pipeline", "recompute": "reentrant"}, stack) and not why_invalid({"world": 2, "wrapper": "pipeline", "recompute": "non-reentrant"}, stack)
    assert not [s for s in next(a for a in all_axes() if a.name == "disk_switch").choice.values if "cache_staged" in str(s)]
    assert [why for pattern, why in refusals() if pattern.search("DeviceMesh is not compatible with LOCAL_STATE_DICT")]
    assert "double" in why_invalid({"world": 2, "wrapper": "fsdp1", "clip": "2"}, stack)


def test_rows_are_drawn_around_the_axes_that_are_asked_for() -> None:
    cover, traits = Cover(around=("before_world", "wrapper=hsdp")), facts(Scenario("chain", {"layers": ["mlp"]}, {"batch": 8}))
    rows = [cover.row(random.Random(n), traits) for n in range(24)]
    assert sum("before_world" in r or r.get("wrapper") == "hsdp" for r in rows) >= 22
    assert len({r["before_world"] for r in rows if "before_world" in r}) >= 3


def test_a_model_of_one_operator_has_its_own_wrapper_and_is_a_finding_of_its_own() -> None:
    cover = Cover()
    for template, wrapper in (("operator", "dtensor"), ("collective", "by_hand"), ("exchange", "exchange")):
        rows = [cover.row(random.Random(n), facts(Scenario(template))) for n in range(12)]
        assert {str(r.get("wrapper", wrapper)) for r in rows} == {wrapper} and sum("wrapper" in r for r in rows) >= 10
    first, second = (Scenario("operator", {"expression": e, "rows": 8}, {}, {"world": 2, "wrapper": "dtensor", "dt_a": "S0"}) for e in ("a.sum(0)", "a.prod()"))
    assert {s.model["expression"] for s in steps(first) if s.template == "operator"} == {"a.sum(0)"}
    ids = {signature(Symptom("inconsistent", "output"), s.setting, model_code(s).subject) for s in (first, second)}
    assert len(ids) == 2 and needs(first) == ("a.sum(0)",)


def test_what_is_refused_for_its_shapes_is_no_row() -> None:
    """FSDP2 cuts the last dimension only evenly, and one call over tensors and DTensors is refused: neither is ever drawn."""
    for layers, width, whole in ((["linear"], 4, True), (["linear", "layernorm"], 5, False)):
        traits = facts(Scenario("chain", {"layers": layers, "width": width}))
        assert ("divides by 2" in traits) == (width == 4) and ("wholly cut" in traits) == whole
        assert bool(why_invalid({"world": 2, "wrapper": "fsdp2", "fsdp_dim": True}, traits)) == (width == 5)
        assert bool(why_invalid({"world": 2, "wrapper": "tp", "clip": "2"}, traits)) != whole
    batch = facts(Scenario("chain", {"layers": ["batchnorm"]}, {"batch": 6}))
    assert "two rows" in why_invalid({"world": 4, "wrapper": "ddp"}, batch) and not why_invalid({"world": 3, "wrapper": "ddp"}, batch)


def test_rows_of_one_model_share_programs() -> None:
    cover, rng = Cover(), random.Random(1)
    traits = facts(Scenario("chain", {"layers": ["mlp"]}))
    programs = cover.programs(rng, traits, 4)
    assert len(programs) == 4 and programs[0] == {} and not [p for p in programs if why_invalid(p, traits)]
    for given in programs:
        row = cover.row(rng, traits, program=given)
        assert program_of_setting(row) == given


def test_rows_of_the_cover_are_programs_and_hold_new_pairs() -> None:
    """For the time that they take, and values that no row held: what is remembered is worth it."""
    traits = model_code(Scenario("chain", {"layers": ["mlp"]})).traits

    def worth(rows: list[Point]) -> tuple[float, int]:
        return len({p for r in rows for p in pairs(r)}) / sum(Cover().cost(r) for r in rows), len({(name, str(value)) for r in rows for name, value in r.items()})

    remembered, chance = [], []
    for start in (3, 4, 5):
        cover, rng = Cover(), random.Random(start)
        rows = [cover.row(rng, traits) for _ in range(100)]
        assert not [r for r in rows if why_invalid(r, traits)]
        assert {str(r.get("wrapper", "none")) for r in rows} >= {"ddp", "fsdp2", "tp", "zero", "hsdp", "tp_fsdp2"}
        remembered.append(worth(rows))
        chance.append(worth([Cover().row(random.Random(1000 * start + seed), traits) for seed in range(100)]))
    for which in (0, 1):
        assert sum(one[which] for one in remembered) > 1.05 * sum(one[which] for one in chance), (remembered, chance)


def test_what_a_rank_computes_of_its_own_rows_is_declared() -> None:
    rules = declared({"world": 2, "wrapper": "ddp"}, frozenset({"local statistics"}))
    assert [r.effect for r in rules] == ["different"] and "rows" in rules[0].why
    assert not declared({"world": 2, "wrapper": "ddp"}, frozenset())
