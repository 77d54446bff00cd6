"""oracle/judging/verdicts.py and oracle/numbers/explain.py: from differences to an answer, and in what way a tensor is wrong."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from proctor.oracle.judging.verdicts import (
    ReplicaConflict,
    TensorVerdict,
    conclude,
    explain_difference,
    judge,
    not_compared,
)
from proctor.oracle.numbers.difference import compare
from proctor.oracle.numbers.explain import rationals
from proctor.oracle.numbers.tolerance import Tolerance

PLACE: dict[str, Any] = {"step": 0, "call": 0, "kind": "output", "name": "layers.0"}


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def verdict_of(c: np.ndarray, r: np.ndarray, relative: float | None = 1e-6) -> TensorVerdict:
    d = compare(c, r, "float32")
    return judge(d, None if relative is None else Tolerance(relative * d.size, d.size), **PLACE)


class TestJudge:
    def test_inside_near_and_outside_the_tolerance(self) -> None:
        r = normal(1000)
        for off, word in ((0.0, "ok"), (2e-7, "ok"), (8e-7, "warn"), (2e-6, "bad")):
            assert verdict_of((r * np.float64(1 + off)).astype(np.float64).astype(np.float32), r, 1e-6).verdict in (word, "warn")
        assert verdict_of(r * np.float32(1.1), r).verdict == "bad"
        assert verdict_of(r * np.float32(1.1), r).ratio == pytest.approx(1e5, rel=1e-3)

    def test_a_wide_tolerance_is_said(self) -> None:
        r = normal(1000)
        found = verdict_of(r * np.float32(1.1), r, 0.5)
        assert found.verdict == "no-power"
        assert "50%" in found.note
        assert verdict_of(r * np.float32(3), r, 0.5).verdict == "bad"  # wrong by more than even that
        assert verdict_of(r, r, 0.5).verdict == "ok"  # bit equality needs no power

    def test_without_noise_only_bit_equality_counts(self) -> None:
        r = normal(10)
        assert verdict_of(r, r, None).verdict == "ok"
        assert verdict_of(r * np.float32(2), r, None).verdict == "no-power"

    def test_new_nans_are_wrong_and_common_infinities_are_not(self) -> None:
        r = normal(10)
        c = r.copy()
        c[3] = np.nan
        assert verdict_of(c, r).verdict == "nonfinite"
        r[3] = c[3] = -np.inf
        assert verdict_of(c, r).verdict == "ok"

    def test_zero_tolerance_of_integers(self) -> None:
        a, b = np.arange(4), np.array([0, 1, 2, 4])
        assert judge(compare(a, b, "int64"), Tolerance(0.0, 4.0), **PLACE).verdict == "bad"
        assert judge(compare(a, a, "int64"), Tolerance(0.0, 4.0), **PLACE).verdict == "ok"


def tensor(word: str, order: float = 0.0, kind: str = "output", step: int = 0, **more: Any) -> TensorVerdict:
    return TensorVerdict(step=step, kind=kind, name=f"m{order:g}", verdict=word, order=order, **more)  # type: ignore[arg-type]


class TestConclude:
    def test_first_is_first_in_the_dataflow(self) -> None:
        found = conclude([tensor("bad", 9, "main_grad"), tensor("bad", 5, "grad_input"), tensor("bad", 7), tensor("ok", 1), tensor("bad", 0, step=1)])
        assert found.verdict == "different"
        assert found.first is not None and (found.first.kind, found.first.order) == ("output", 7)
        assert found.exit_code == 1

    def test_gradients_of_inputs_and_outputs_share_an_order(self) -> None:
        found = conclude([tensor("bad", 4, "grad_output"), tensor("bad", 3, "grad_input")])
        assert found.first is not None and found.first.kind == "grad_input"

    def test_a_replica_conflict_alone_makes_it_different(self) -> None:
        found = conclude([tensor("ok")], [ReplicaConflict(kind="main_grad", name="w", axis="tp", ranks=(1,))])
        assert (found.verdict, found.first) == ("different", None)

    def test_nothing_compared_is_inconclusive(self) -> None:
        assert conclude([]).exit_code == 3
        assert conclude([tensor("unmapped")]).verdict == "inconclusive"

    def test_no_power_in_most_is_inconclusive(self) -> None:
        assert conclude([tensor("no-power"), tensor("no-power"), tensor("ok")]).verdict == "inconclusive"
        assert conclude([tensor("no-power"), tensor("ok")]).verdict == "equivalent"

    def test_a_reason_against_any_verdict_wins(self) -> None:
        found = conclude([tensor("bad")], inconclusive="the reference differs from itself")
        assert (found.verdict, found.reason) == ("inconclusive", "the reference differs from itself")

    def test_missing_and_shape_are_wrong(self) -> None:
        lost = not_compared("missing", "the candidate lacks it", **PLACE)
        assert conclude([tensor("ok"), lost]).verdict == "different"
        assert math.isinf(lost.ratio)


class TestExplain:
    def say(self, c: np.ndarray, r: np.ndarray, kind: str = "main_grad", relative: float = 1e-6, **more: Any) -> str:
        return explain_difference(c, r, "float32", kind, relative * float(np.linalg.norm(r)), **more)

    @pytest.mark.parametrize(("factor", "text"), [(2.0, "2"), (0.5, "1/2"), (4.0, "4"), (0.125, "1/8"), (-1.0, "-1"), (1.5, "3/2"), (2 / 3, "2/3"), (0.7310585, "0.7311")])
    def test_wrong_factor(self, factor: float, text: str) -> None:
        r = normal(64, 64)
        assert self.say((r * factor).astype(np.float32), r) == f"gradient scale {text}"
        assert self.say((r * factor).astype(np.float32), r, "output") == f"scale {text}"

    def test_factor_with_rounding_noise_in_bfloat16(self) -> None:
        r = normal(256, 64)
        c = (2 * r * (1 + 2.0**-7 * normal(256, 64, seed=5))).astype(np.float32)
        assert self.say(c, r, relative=0.03) == "gradient scale 2"

    def test_an_unrelated_tensor_is_not_explained(self) -> None:
        assert self.say(normal(64, 64, seed=1), normal(64, 64)) == ""
        assert self.say(normal(64, 64, seed=1), normal(64, 64), relative=0.05) == ""

    def test_within_tolerance_there_is_nothing_to_explain(self) -> None:
        r = normal(8)
        assert self.say(r, r) == ""

    def test_zero_on_either_side(self) -> None:
        r = normal(8)
        assert self.say(np.zeros_like(r), r) == "zero"
        assert explain_difference(r, np.zeros_like(r), "float32", "output", 1e-12) == "the reference is zero"

    def test_missing_sum_over_ranks(self) -> None:
        a, b = normal(32, 8), normal(32, 8, seed=2)
        found = self.say(a, a + b, relative=1e-5, parts=[a, b], axis="tp")
        assert found.startswith("partial sum: the values of axis tp")
        assert self.say(a, (a + b) / 2, relative=1e-5, parts=[a, b]).startswith("partial mean")

    def test_stale_value(self) -> None:
        old, new = normal(32), normal(32, seed=2)
        assert self.say(old, new, earlier={"step 0": old}) == "stale: the value of step 0"

    def test_error_in_a_part_of_a_dimension(self) -> None:
        r = normal(64, 16)
        c = r.copy()
        c[32:48] *= 2
        assert self.say(c, r) == "only in dim 0 [32:48] of 64: gradient scale 2"
        c = r.copy()
        c[:, 4:8] = 0
        assert self.say(c, r) == "only in dim 1 [4:8] of 16: zero"
        c = r.copy()
        c[::4] += 1
        assert self.say(c, r) == "only in 16 of 64 slices of dim 0"

    def test_shuffled_rows(self) -> None:
        r = normal(64, 16)
        assert self.say(r[::-1].copy(), r) == "the same values in another order"
        near = r + np.float32(5e-3) * normal(64, 16, seed=2)  # sorted, they lie close together; they are other values all the same
        assert self.say(near, r) == ""

    def test_nonfinite_and_integers(self) -> None:
        r = normal(8)
        c = r.copy()
        c[0] = np.nan
        assert self.say(c, r) == "1 of 8 elements are NaN or infinite"
        assert explain_difference(np.array([1, 2, 3, 4]), np.array([1, 2, 3, 5]), "int64", "output", 0.0).startswith("1 of 4 elements differ")

    def test_simplest_factor_first(self) -> None:
        words = [str(f) for f in rationals()]
        assert set(words[:3]) == {"-1", "2", "1/2"}
        assert words.index("4") < words.index("15/4")
        assert len(words) == len(set(words)) and "1" not in words


def test_a_whole_sweep_of_noise_is_never_explained_as_something() -> None:
    for seed in range(20):
        r = normal(40, 40, seed=seed)
        c = (r + 1e-2 * normal(40, 40, seed=seed + 50)).astype(np.float32)
        assert explain_difference(c, r, "float32", "output", 1e-3 * float(np.linalg.norm(r))) == ""
