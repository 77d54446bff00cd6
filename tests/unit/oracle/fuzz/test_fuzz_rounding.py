"""How far a program's own rounding carries, without ranks: what is moved, by how much, and what is said of differences of that size."""

from __future__ import annotations

import math
from typing import Any

import pytest

from proctor.oracle.fuzz.axes import declared
from proctor.oracle.fuzz.facts import facts
from proctor.oracle.fuzz.program import program
from proctor.oracle.fuzz.report import jsonout, summary, terminal
from proctor.oracle.fuzz.running.judge import MISSING, OWN, Difference, Reference, judge, unit_of
from proctor.oracle.fuzz.running.observe import Seen
from proctor.oracle.fuzz.running.outcome import Outcome, outcome_of
from proctor.oracle.fuzz.running.rank import _own, _tensors
from proctor.oracle.fuzz.running.rounding import Rounded
from proctor.oracle.fuzz.running.worlds import Answer
from proctor.oracle.fuzz.search.campaign import Pair, Row
from proctor.oracle.fuzz.sessions.journal import Asked
from proctor.oracle.fuzz.space import Point
from proctor.oracle.fuzz.spec import Scenario

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

DOUBLE, BFLOAT16 = unit_of(0.0, "torch.float64"), unit_of(0.15, "torch.float64")


def test_results_move_by_a_unit_of_their_type_or_of_a_coarser_one() -> None:
    a, b = torch.full((1000,), 1.1, dtype=torch.float64), torch.full((1000,), 1.3, dtype=torch.float64)
    for unit, tensor in ((DOUBLE, a), (2.0**-23, a.float()), (BFLOAT16, a.bfloat16()), (BFLOAT16, a)):
        with Rounded(unit if tensor.dtype == a.dtype else DOUBLE, 0):
            moved = tensor * b.to(tensor.dtype)
        off = ((moved.double() / (tensor * b.to(tensor.dtype)).double()) - 1).abs().max()
        assert unit / 2 < off < 8 * unit, (unit, off)
    with Rounded(DOUBLE, 0):
        assert bool((a * b != 1.1 * 1.3).any())
    assert bool((a == 1.1).all()) and bool((b == 1.3).all())  # operands are as they were


def test_views_whole_numbers_zeros_and_what_a_generator_draws_stay() -> None:
    plain = torch.tensor([0.3, 0.0, -7.0, 1e300], dtype=torch.float64)
    torch.manual_seed(0)
    drawn = torch.randn(5)
    torch.manual_seed(0)
    with Rounded(BFLOAT16, 0):
        view, counted, zeros = plain.view(2, 2).t()[0], torch.ones(3) + torch.ones(3), plain * 0.0
        again = torch.randn(5)
        doubled = plain * 1.0
    assert view[0] == plain[0] and torch.equal(counted, torch.full((3,), 2.0)) and not zeros.any()
    assert torch.equal(again, drawn)
    assert doubled[1] == 0.0 and doubled[2] == -7.0 and doubled[0] != 0.3 and doubled[3] != 1e300


def test_an_optimizer_steps_in_its_own_type() -> None:
    p = torch.nn.Parameter(torch.full((100,), 0.7, dtype=torch.float64))
    optimizer = torch.optim.SGD([p], lr=0.1)
    with Rounded(BFLOAT16, 0):
        (p * 0.9).sum().backward()
        optimizer.step()
    assert p.grad is not None
    assert float((p.grad / 0.9 - 1).abs().max()) > BFLOAT16 / 4
    assert float((p.detach() + 0.1 * p.grad - 0.7).abs().max()) < 1e-14


def moved(template: str, model: Point, setting: Point, unit: float, seed: int = 0) -> tuple[dict[str, Any], dict[str, float]]:
    """Tensors of a reference, and how far its own rounding moves each of them."""
    scenario = Scenario(template, model, {"batch": 4, "steps": 2, "seed": seed}, setting)
    plain = _tensors(program(scenario).codes())
    return plain, _own(plain, [program(scenario, permuted=seed).codes() for seed in (1, 2, 3, 4)], unit)


@pytest.mark.parametrize("setting", [{}, {"optimizer": "Adam"}, {"optimizer": "ASGD"}, {"clip": "value"}, {"clip": "inf"}], ids=str)
def test_a_program_in_double_precision_moves_by_nothing_that_counts(setting: Point) -> None:
    plain, noise = moved("chain", {"layers": ["mlp", "layernorm"]}, setting, DOUBLE)
    assert plain.keys() == noise.keys()
    assert max(noise.values()) < 1e-6
    assert all(noise[key] < 1e-12 for key in noise if key.startswith("0/gradient") or key.startswith("0/output"))


def test_what_turns_by_a_rounding_has_noise_of_its_own_size() -> None:
    """The larger of two values that are one in bfloat16 turns, and with it whose gradient it is; a layer by itself has what its operations round away. An element of a gradient that clipping by value leaves as it is keeps the rounding of what was made small."""
    plain, calm = moved("chain", {"layers": ["linear"]}, {}, BFLOAT16)
    key = "0/gradient/layers.0.weight"
    assert 1e-4 < calm[key] / np.abs(plain[key]).max() < 0.1
    plain, largest = moved("dlrm", {"rows": 9, "width": 8, "mode": "max"}, {}, BFLOAT16, seed=20)
    assert max(largest[k] / np.abs(plain[k]).max() for k in plain if k.startswith("0/gradient/bags")) > 0.1
    plain, clipped = moved("chain", {"layers": ["mlp", "layernorm"]}, {"precision": "autocast", "clip": "value"}, unit_of(0.0, "autocast"))
    assert max(clipped[k] / np.abs(plain[k]).max() for k in plain if k.startswith("0/clipped")) > 2 * max(clipped[k] / np.abs(plain[k]).max() for k in plain if k.startswith("0/gradient"))


def test_what_is_not_finite_when_it_is_rounded_otherwise_tells_nothing() -> None:
    """The gradient of a largest element compares it with its source: where it was moved, no source is equal to it, and the gradient is 0 / 0."""
    plain = {"0/gradient/w": np.ones(3)}
    lost = Reference(plain, {}, 2e-7, steady=True, own={"0/gradient/w": 0.0})
    found = judge(Seen("gradient", "w", np.full(3, np.nan)), 0, lost, 0.0)
    assert found is not None and found.error == MISSING and not found.rounding


def test_a_difference_is_rounding_up_to_a_stated_multiple_of_the_programs_own() -> None:
    whole = np.linspace(1.0, 2.0, 8)
    known = Reference({"0/gradient/w": whole}, {}, 2e-7, steady=True, own={"0/gradient/w": 1e-3})
    for off, rounding in ((0.9 * OWN, True), (1.1 * OWN, False)):
        found = judge(Seen("gradient", "w", whole + off * 1e-3), 0, known, 0.0)
        assert found is not None and found.rounding is rounding and found.noise == 1e-3
    assert judge(Seen("gradient", "w", whole), 0, known, 0.0) is None
    unasked = judge(Seen("gradient", "w", whole + 1e-3), 0, Reference({"0/gradient/w": whole}, {}, 2e-7, steady=True), 0.0)
    assert unasked is not None and not unasked.rounding
    assert known.lost(0, "w").rounding is False
    assert Reference({}, {}, 2e-7, steady=True, own={"0/gradient/w": MISSING}).lost(0, "w").rounding  # another run has no gradient, too: an expert that nothing was sent to


def answer(*differences: dict[str, Any], apart: bool = False) -> Outcome:
    sums = (1, 2) if apart else (1, 1)
    return outcome_of(Answer(tuple({"differences": list(differences), "digests": {"0/parameter/w|": s}} for s in sums)), [])


def test_rounding_is_a_verdict_with_its_number_and_hides_nothing_else() -> None:
    small = {"step": 0, "kind": "gradient", "name": "w", "error": 0.1, "allowed": 0.05, "largest": 1.0, "candidate": "0.1", "reference": "0.2", "noise": 0.08}
    large = {**small, "step": 1, "kind": "parameter", "name": "b", "error": 0.5}
    said = answer(small)
    assert said.verdict == "rounding" and not said.failed and "off by 0.1" in said.why and "0.08" in said.why
    both = answer(small, large)
    assert both.verdict == "inconsistent" and both.first is not None and both.first.name == "b"
    assert answer(small, apart=True).verdict == "replicas"
    assert answer({**small, "noise": -1.0}).verdict == "inconsistent"
    assert Difference(0, "gradient", "w", math.inf, 0.0, 0.0, noise=1e3).rounding is False


def test_the_type_that_a_candidate_computes_in_is_that_of_what_is_declared() -> None:
    assert DOUBLE == 2.0**-52 and BFLOAT16 == 2.0**-7
    assert unit_of(3e-5, "torch.float64") == unit_of(0.0, "torch.float32") == unit_of(0.0, "autocast") == 2.0**-23
    assert unit_of(0.15, "torch.float32") == 2.0**-7


def test_what_the_programs_noise_tells_is_no_longer_declared() -> None:
    routed, largest = facts(Scenario("moe", {}, {})), facts(Scenario("dlrm", {"mode": "max"}, {}))
    for point in ({"wrapper": "fsdp2", "fsdp_policy": "param_dtype=torch.bfloat16"}, {"wrapper": "fsdp1", "fsdp1_policy": "param_dtype=torch.bfloat16"}, {"wrapper": "deepspeed", "ds_precision": "bf16"}):
        for traits in (routed, largest):
            assert {r.effect for r in declared({**point, "world": 2}, traits)} == {"approximate"}
    assert not declared({"optimizer": "ASGD", "implementation": "foreach=True"}, frozenset())


def test_reports_count_what_is_rounding_and_say_each_of_them() -> None:
    pair = Pair(0, Scenario("chain"), (Row({"clip": "value"}, "rounding", "within the program's own noise: gradient w is off by 0.1"),), 0, 0.1)
    whole = summary(Asked(1, ("torch",), 16, 1, {"torch": "2.13.0"}), [], [pair])
    assert whole.verdicts == {"rounding": 1} and "clip=value" in whole.rounding[0]
    said = terminal.render(whole, "here")
    assert "1 rounding" in said and "off by 0.1" in said and "nothing found" in said
    assert "off by 0.1" in jsonout.render(whole)
