"""oracle/localising/localise.py: from a run on the reference's values to the module that is wrong."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

import proctor.oracle.localising.localise as localising
from proctor.errors import OracleError
from proctor.oracle.judging.blame import culprit
from proctor.oracle.judging.verdicts import ASTRAY, ReplicaConflict, TensorVerdict, Verdict, conclude
from proctor.oracle.localising.localise import localise
from proctor.oracle.report import Report

ORDER = {"a": 0.0, "b": 1.0, "c": 2.0}


def tensor(kind: str, name: str, *, wrong: bool = True, **more: Any) -> TensorVerdict:
    values: dict[str, Any] = {"rel_err": 0.1, "ratio": 50.0, "verdict": "bad" if wrong else "ok", "source": f"{name}.py:1", **more}
    taken = 20.0 if kind == "main_grad" else 0.0  # gradients are taken when the passes are over
    return TensorVerdict(kind=kind, name=name, order=taken + ORDER.get(name.split(".")[0], 9.0), **values)


def verdict(*tensors: TensorVerdict, replicas: tuple[ReplicaConflict, ...] = ()) -> Verdict:
    return Verdict(verdict="different", tensors=tensors, replicas=replicas)


@pytest.mark.parametrize(
    ("wrong", "module", "direction"),
    [
        ((("output", "b"), ("grad_input", "b"), ("main_grad", "b.w")), "b", "forward"),
        ((("grad_input", "c"), ("main_grad", "a.w")), "c", "backward"),
        ((("main_grad", "b.w"), ("param_after", "b.w")), "b", "gradient"),
        ((("param_after", "a.w"),), "a", "update"),
        ((("input", "a.inner"),), "a", "forward"),
    ],
)
def test_the_earliest_cause_is_named(wrong: tuple[tuple[str, str], ...], module: str, direction: str) -> None:
    alone = verdict(*(tensor(kind, name) for kind, name in wrong), tensor("output", "a", wrong=False))
    found = culprit(verdict(tensor("output", "c")), alone)
    assert found is not None and (found.module, found.direction) == (module, direction)


def test_what_went_wrong_only_by_inheritance_is_no_culprit() -> None:
    alone = verdict(tensor("output", "b"), tensor("output", "c", wrong=False))
    found = culprit(verdict(tensor("output", "b"), tensor("output", "c")), alone)
    assert found is not None and found.module == "b"


def test_a_parameter_that_is_missing() -> None:
    found = culprit(verdict(), verdict(tensor("param", "b.bias", verdict="missing"), tensor("output", "a")))
    assert found is not None and (found.module, found.direction) == ("b", "model") and "b.bias" in found.text


def test_replicas_say_why_a_gradient_is_wrong() -> None:
    apart = ReplicaConflict(kind="main_grad", name="b.w", axis="tp", ranks=(1,), note="replicas differ along tp")
    found = culprit(verdict(replicas=(apart,)), verdict(tensor("main_grad", "b.w")))
    assert found is not None and "replicas differ along tp" in found.text


@pytest.mark.parametrize(
    ("kind", "name", "module", "direction"), [("buffer_after", "b.mean", "b", "forward"), ("master", "a.w", "a", "update")]
)
def test_buffers_and_master_copies_name_their_module(kind: str, name: str, module: str, direction: str) -> None:
    found = culprit(verdict(), verdict(tensor(kind, name, note="it stays")))
    assert found is not None and (found.module, found.direction) == (module, direction) and "it stays" in found.text


@pytest.mark.parametrize(("kind", "direction"), [("param", "model"), ("param_after", "update")])
def test_replicas_that_differ_are_the_cause_where_nothing_else_is_wrong(kind: str, direction: str) -> None:
    apart = ReplicaConflict(kind=kind, name="b.w", axis="rank", ranks=(1,), majority=(0,), note="rank 1 makes no update")
    found = culprit(verdict(replicas=(apart,)), verdict(tensor("output", "a", wrong=False)))
    assert found is not None and (found.module, found.direction) == ("b", direction) and "no update" in found.text


def test_nothing_differs_alone() -> None:
    assert culprit(verdict(tensor("output", "b")), verdict(tensor("output", "b", wrong=False))) is None


def test_of_several_steps_the_first_tells_the_side() -> None:
    alone = verdict(tensor("main_grad", "b.w", step=1), tensor("output", "a", step=2), tensor("output", "a", wrong=False))
    found = culprit(verdict(), alone)
    assert found is not None and (found.module, found.direction) == ("b", "gradient")


@pytest.mark.parametrize("same", [True, False])
def test_one_factor_of_all_gradients_blames_no_parameter(same: bool) -> None:
    notes = ("gradient scale 0.5", "gradient scale 0.5", "gradient scale 0.5" if same else "gradient scale 0.25")
    held = [tensor("main_grad", f"{name}.w", note=note) for name, note in zip("abc", notes, strict=True)]
    found = culprit(verdict(), verdict(*held, *([] if same else [tensor("main_grad", "d.w", wrong=False, abs_err=1e-9)])))
    assert found is not None and found.direction == "gradient"
    assert found.module == ("" if same else "a") and ("clipping" in found.text) == same


@pytest.mark.parametrize(("budget", "said"), [(0.0, "its CPU seconds are used up (--budget SECONDS)"), (60.0, "train.py: ended with code 1")])
def test_a_search_that_fails_or_takes_too_long_leaves_the_comparison_as_it_is(monkeypatch: pytest.MonkeyPatch, budget: float, said: str) -> None:
    def fails(*_: Any) -> Report:
        raise OracleError("train.py: ended with code 1")

    monkeypatch.setattr(localising, "_localised", fails)
    found = localise(Report(verdict(tensor("output", "b"))), None, [], budget_s=budget)  # type: ignore[arg-type]
    assert found.verdict.verdict == "different" and found.verdict.culprit is None
    assert found.verdict.notes == (f"the culprit was not found: {said}",)


@pytest.mark.parametrize(("kind", "direction"), [("main_grad", "gradient"), ("param_after", "update")])
@pytest.mark.parametrize("right", [True, False])
def test_what_is_wrong_of_all_parameters_blames_none_of_them(kind: str, direction: str, right: bool) -> None:
    held = [tensor(kind, f"{name}.w") for name in "abc"] + [tensor(kind, "d.w", wrong=not right, abs_err=1e-9)]
    found = culprit(verdict(), verdict(*held))
    assert found is not None and (found.module, found.direction) == ("a" if right else "", direction)


@pytest.mark.parametrize(("kind", "direction"), [("input", "forward"), ("grad_output", "backward")])
def test_where_the_runs_part_comes_before_what_only_follows(kind: str, direction: str) -> None:
    """The input of a module that nobody can place is no error alone; it is where the runs part all the same."""
    begins = tensor(kind, "a.list.b", wrong=False, verdict="unmapped")
    ends = Verdict(verdict="different", tensors=(begins, tensor("output", "a", wrong=False)), first=begins)
    found = culprit(ends, verdict(tensor("main_grad", "a.w")))
    assert found is not None and (found.module, found.direction) == ("a", direction)


def test_an_all_reduce_that_is_missing_in_the_backward_pass_is_found_where_its_sum_is_used() -> None:
    note = "partial sum: the values of axis rank add up to the reference, a sum over them is missing"
    alone = verdict(tensor("main_grad", "a.w", note=note), tensor("main_grad", "b.w", note=note), tensor("grad_output", "b", wrong=False, layout="partial sums"))
    found = culprit(verdict(), alone)
    assert found is not None and (found.module, found.direction) == ("b", "backward") and "all-reduce" in found.text


@pytest.mark.parametrize(("off", "module"), [(True, "a.b"), (False, "a")])
def test_inside_what_is_named_the_module_where_the_runs_part_is_named_if_it_is_off_alone(off: bool, module: str) -> None:
    begins = tensor("output", "a.b", wrong=False, verdict="unmapped", rel_err=1.0)
    ends = Verdict(verdict="different", tensors=(begins, tensor("output", "a")), first=begins)
    found = culprit(ends, verdict(tensor("output", "a.b", wrong=False, **({"verdict": "unmapped", "rel_err": 1.0} if off else {})), tensor("output", "a")))
    assert found is not None and (found.module, found.direction) == (module, "forward")


@pytest.mark.parametrize("right", [True, False])
def test_what_is_right_end_to_end_is_not_believed_to_be_wrong_alone(right: bool) -> None:
    """The values that were given are at fault, unless the tolerance end to end hides as much."""
    alone = verdict(tensor("output", "b", rel_err=0.1), tensor("main_grad", "a.w"))
    found = culprit(verdict(tensor("output", "b", wrong=False, rel_err=1e-7, tolerance=1e-5 if right else 0.2), tensor("main_grad", "a.w")), alone)
    assert found is not None and (found.module, found.direction) == (("a", "gradient") if right else ("b", "forward"))


def test_a_module_that_is_not_given_what_it_should_get_is_no_culprit() -> None:
    called = [tensor("input", name, wrong=False) for name in ("a", "a.b", "a.b.list.c")]
    alone = verdict(tensor("output", "a.b.list.c"), *called)
    found = culprit(verdict(*called), alone, {("input", "a.b.list.c"): "mask", ("input", "a.b"): "mask"})
    assert found is not None and (found.module, found.direction) == ("a.b", "forward") and "not given mask" in found.text
    other = culprit(verdict(*called), alone, {("input", "a.b"): "mask"})
    assert other is not None and other.module == "a.b.list.c"


@pytest.mark.parametrize(("stops", "module", "direction"), [("a", "a", "backward"), ("b", "a", "gradient")])
def test_gradients_that_are_missing_are_missed_where_the_backward_pass_stops(stops: str, module: str, direction: str) -> None:
    found = culprit(verdict(), verdict(tensor("main_grad", "a.w", verdict="missing")), {("grad_output", stops): ""})
    assert found is not None and (found.module, found.direction) == (module, direction)


def test_replicas_that_begin_apart_come_before_what_follows_from_them() -> None:
    apart = ReplicaConflict(kind="param", name="b.w", axis="rank", ranks=(1,), majority=(0,), note="a broadcast is missing")
    found = culprit(verdict(tensor("output", "a"), replicas=(apart,)), verdict(tensor("output", "a")))
    assert found is not None and (found.module, found.direction) == ("b", "model") and "a broadcast is missing" in found.text


def test_a_setting_is_the_cause_where_it_shows_nowhere_alone() -> None:
    said = tensor("scalar", "beta2_decay", note="beta2_decay -0.5, the reference has -0.8")
    found = culprit(verdict(said, tensor("param_after", "a.w", step=1)), verdict(tensor("param_after", "a.w", wrong=False)))
    assert found is not None and (found.module, found.direction) == ("", "update") and "-0.8" in found.text


def test_a_moment_that_is_wrong_of_all_parameters_blames_none_of_them() -> None:
    found = culprit(verdict(), verdict(*(tensor("opt_state", f"{name}.w", slot="exp_avg") for name in "abc")))
    assert found is not None and (found.module, found.direction) == ("", "update") and "exp_avg" in found.text


def test_a_gradient_of_a_gradient_blames_no_module_that_it_passes() -> None:
    found = culprit(verdict(), verdict(tensor("grad_output", "b", slot="#1", wrong=False), tensor("grad_input", "b", slot="#1")))
    assert found is not None and (found.module, found.direction) == ("", "backward") and "past b again" in found.text


@pytest.mark.parametrize("asked", [True, False])
def test_what_runs_after_its_gradients_were_taken_follows_from_them(asked: bool) -> None:
    alone = verdict(tensor("output", "a", call=1), TensorVerdict(kind="main_grad", name="a.w", verdict="bad", order=-1.0 if asked else 5.0))
    ends = Verdict(verdict="different", tensors=alone.tensors, first=alone.tensors[0])
    found = culprit(ends, alone)
    assert found is not None and (found.module, found.direction) == ("a", "gradient" if asked else "forward")


@pytest.mark.parametrize("taken", [True, False])
def test_the_first_wrong_tensor_is_none_of_those_that_follow_an_update_within_the_step(taken: bool) -> None:
    """A GAN: the judge's second pass, after its update, is wrong because its gradients were."""
    wrong = (tensor("output", "c", call=1), tensor("grad_output", "b"))
    gradient = tensor("main_grad", "b.w", wrong=taken)
    found = conclude((*wrong, msgspec.structs.replace(gradient, order=1.5)))
    assert found.first is not None and (found.first.kind, found.first.name) == (("grad_output", "b") if taken else ("output", "c"))


@pytest.mark.parametrize("seen", [True, False])
def test_what_a_module_is_called_with_after_an_update_by_hand_is_not_the_module(seen: bool) -> None:
    """New parameters made of gradients, of which no optimizer knows: right in the first pass and its gradients, wrong in the second pass."""
    right = [tensor("output", "a", wrong=False), tensor("grad_output", "a", wrong=False)]
    later = msgspec.structs.replace(tensor("output", "a", call=1), order=3.0)
    alone = verdict(*right, later, *([tensor("main_grad", "a.w", wrong=False)] if seen else []))
    found = culprit(msgspec.structs.replace(alone, first=later), alone)
    assert found is not None and (found.module, found.direction) == (("a", "forward") if seen else ("", "update"))


@pytest.mark.parametrize(("order", "module"), [(-1.0, "a.b"), (5.0, "a")])
def test_shards_that_make_up_no_whole_inside_what_is_named_are_nearer_to_the_error(order: float, module: str) -> None:
    hidden = TensorVerdict(kind="input", name="a.b.c", verdict="unmapped", rel_err=math.inf, ratio=math.inf, order=order)
    called = tensor("input", "a.b", wrong=False)
    found = culprit(verdict(hidden, called, tensor("output", "a")), verdict(hidden, called, tensor("output", "a")))
    assert found is not None and (found.module, found.direction) == (module, "forward")


def test_a_value_that_some_ranks_lack_comes_before_what_makes_up_no_whole() -> None:
    lacks = tensor("input", "a", wrong=False, verdict="unmapped", layout=ASTRAY)
    hidden = TensorVerdict(kind="grad_output", name="b.c", verdict="unmapped", rel_err=math.inf, ratio=math.inf, order=-1.0)
    alone = verdict(hidden, tensor("grad_output", "b"))
    found = culprit(Verdict(verdict="different", tensors=(lacks, *alone.tensors), first=lacks), alone)
    assert found is not None and (found.module, found.direction) == ("", "forward")


def test_a_module_whose_forward_is_nobody_s_part_is_not_blamed_for_its_backward() -> None:
    lost = {"wrong": False, "verdict": "unmapped", "rel_err": float("inf"), "ratio": float("inf")}
    tensors = (tensor("input", "", wrong=False), tensor("input", "b.in", **lost), tensor("output", "b.in", **lost), tensor("grad_input", "b.in", verdict="unmapped", rel_err=1.8), tensor("main_grad", "b.in.w"))
    ends = msgspec.structs.replace(verdict(*tensors), first=tensors[3])
    found = culprit(ends, verdict(*tensors))
    assert found is not None and (found.module, found.direction) == ("", "forward") and "what goes into b.in" in found.text
    placed = (tensors[0], tensor("input", "b.in", wrong=False), tensor("output", "b.in", wrong=False), tensor("grad_input", "b.in"))
    found = culprit(verdict(*placed), verdict(*placed))
    assert found is not None and (found.module, found.direction) == ("b.in", "backward")
