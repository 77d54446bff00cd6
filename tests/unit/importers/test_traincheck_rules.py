"""Each of TrainCheck's relations on small traces: when a rule fails, holds, or does not apply."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers.traincheck import Log, api, clause, invariant, tensor, value, var, when, write

from proctor.infer.importers.traincheck.rules import convert
from proctor.infer.importers.traincheck.run import import_run
from proctor.invariants.pack import Pack
from proctor.invariants.trace import Trace
from proctor.verify.checker import check

Verdict = Callable[..., str]

STEP = "torch.optim.sgd.SGD.step"
ZERO = "torch.optim.optimizer.Optimizer.zero_grad"
ADD = "torch.add_"
TRAINING = clause("constant", "meta_vars.stage", "training")


@pytest.fixture
def verdict(tmp_path: Path) -> Verdict:
    """failed, passed, idle or unknown: one rule on the records of these processes."""

    def judge(rule: Mapping[str, Any], *logs: Log) -> str:
        run = tmp_path / "run"
        import_run(write(tmp_path / "trace", *logs), run, overwrite=True)
        result = check(Trace.load([run]), [Pack([convert(dict(rule))])])
        assert not [n for n in result.notes if "could not be evaluated" in n]
        if result.violations:
            return "failed"
        return "passed" if result.checked else "idle" if result.not_triggered else "unknown"

    return judge


def test_contain_asks_for_the_call_in_every_parent(verdict: Verdict) -> None:
    rule = invariant("APIContainRelation", api(STEP), api(ADD))
    log = Log()
    with log.inside(STEP):
        log.call(ADD)
    assert verdict(rule, log) == "passed"
    log.call(STEP)
    assert verdict(rule, log) == "failed"


def test_a_contained_call_is_in_the_same_thread_and_returned(verdict: Verdict) -> None:
    rule = invariant("APIContainRelation", api(STEP), api(ADD))
    log, other = Log(), Log(thread=8, start=1001)
    with log.inside(STEP):
        log.call(ADD, raises="ValueError")
        other.call(ADD)
    assert verdict(rule, log, other) == "failed"
    raising = invariant("APIContainRelation", api(STEP), api(ADD, exception="ValueError"))
    assert verdict(raising, log, other) == "passed"


def test_contain_with_arguments_names_positional_ones_by_the_installed_source(verdict: Verdict) -> None:
    child = "json.decoder.JSONDecoder.decode"
    wanted = {"args": {"s": {"str": "x"}}, "func_name": child}
    rule = invariant("APIContainRelation", api(STEP), api(child, arguments=wanted))
    for text, expected in (("x", "passed"), ("y", "failed")):
        log = Log()
        with log.inside(STEP):
            log.call(child, args={"0": {"json.decoder.JSONDecoder": {}}, "1": {"str": text}})
        assert verdict(rule, log) == expected


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [(5, None, "passed"), (0, None, "failed"), (5, 6, "failed"), (None, None, "failed")],
)
def test_contain_a_change_to_a_value(verdict: Verdict, before: Any, after: Any, expected: str) -> None:
    rule = invariant("APIContainRelation", api(ZERO), var("grad", pre_value="non_zero", post_value=None))
    log = Log()
    log.state("model.w", data=1, grad=before)
    with log.inside(ZERO):
        log.state("model.w", data=1, grad=after)
    assert verdict(rule, log) == expected


def test_an_inverted_precondition_excludes(verdict: Verdict) -> None:
    rule = invariant("APIContainRelation", api(STEP), api(ADD), precondition=when(TRAINING, inverted=True))
    log = Log(stage="training")
    log.call(STEP)
    assert verdict(rule, log) == "idle"
    log.meta_vars["stage"] = "evaluation"
    log.call(STEP)
    assert verdict(rule, log) == "failed"


def test_records_before_the_first_stage_belong_to_init(verdict: Verdict) -> None:
    rule = invariant(
        "APIContainRelation", api(STEP), api(ADD), precondition=when(clause("constant", "meta_vars.stage", "init"))
    )
    log = Log()
    log.call(STEP)
    assert verdict(rule, log) == "idle"
    log.meta_vars["stage"] = "training"
    log.call(ZERO)
    assert verdict(rule, log) == "failed"


def test_a_text_is_not_a_number(verdict: Verdict) -> None:
    rule = invariant(
        "APIContainRelation", api(STEP), api(ADD), precondition=when(clause("constant", "meta_vars.rank", 0.0, 1.0))
    )
    for rank, expected in ((0, "failed"), ("0", "idle"), (1.0, "failed"), (2, "idle")):
        log = Log(rank=rank)
        log.call(STEP)
        assert verdict(rule, log) == expected


def test_context_managers_are_fields_while_they_are_active(verdict: Verdict) -> None:
    manager = "torch.amp.autocast_mode.autocast"
    field = f"meta_vars.context_managers.{manager}"
    clauses = (clause("exist", field), clause("constant", field, "torch.float16", path=["dtype"]))
    rule = invariant("APIContainRelation", api(STEP), api(ADD), precondition=when(*clauses))
    for dtype, inside, expected in (("torch.float16", True, "failed"), ("torch.bfloat16", True, "idle"), ("torch.float16", False, "idle")):
        log = Log()
        log.call(f"{manager}.__init__", obj=3, kwargs={"dtype": {"torch.dtype": dtype}})
        log.call(f"{manager}.__enter__", obj=3)
        if inside:
            log.call(STEP)
        log.call(f"{manager}.__exit__", obj=3)
        if not inside:
            log.call(STEP)
        assert verdict(rule, log) == expected


def _order(*names: str) -> Log:
    log = Log()
    for name in names:
        log.call(name)
    return log


def test_cover_wants_the_first_between_two_calls_of_the_second(verdict: Verdict) -> None:
    rule = invariant("FunctionCoverRelation", api("m.a"), api("m.b"))
    assert verdict(rule, _order("m.a", "m.b", "m.a", "m.b")) == "passed"
    assert verdict(rule, _order("m.a", "m.b", "m.b")) == "failed"
    assert verdict(rule, _order("m.c", "m.b")) == "failed", "the first function was never called"
    assert verdict(rule, _order("m.b")) == "idle", "nothing was called beside it"
    assert verdict(rule, _order("m.a", *["m.b"] * 3)) == "idle", "called over and over"


def test_lead_wants_the_second_between_two_calls_of_the_first(verdict: Verdict) -> None:
    rule = invariant("FunctionLeadRelation", api("m.a"), api("m.b"))
    assert verdict(rule, _order("m.a", "m.b", "m.a", "m.b")) == "passed"
    assert verdict(rule, _order("m.a", "m.b", "m.a")) == "passed", "nothing has to follow the last call"
    assert verdict(rule, _order("m.a", "m.a", "m.b")) == "failed"
    nested = Log()
    with nested.inside("m.a"):
        nested.call("m.b")
    nested.call("m.c")
    assert verdict(rule, nested) == "failed", "a nested call is not one that follows"


def test_order_looks_only_at_calls_that_meet_the_precondition(verdict: Verdict) -> None:
    rule = invariant("FunctionCoverRelation", api("m.a"), api("m.b"), precondition=when(TRAINING))
    log = Log(stage="training")
    log.call("m.a")
    log.call("m.b")
    log.meta_vars["stage"] = "evaluation"
    log.call("m.c")
    log.call("m.b")
    assert verdict(rule, log) == "passed"


def test_distinct_arguments_within_a_step(verdict: Verdict) -> None:
    rule = invariant("DistinctArgumentRelation", api("torch.normal_"))

    def drawn(*shapes_and_steps: tuple[list[int], int, int]) -> Log:
        log = Log()
        for shape, address, step in shapes_and_steps:
            log.meta_vars["step"] = step
            log.call("torch.normal_", args={"0": tensor(shape=shape, _ML_DAIKON_data_ID=address)})
        return log

    assert verdict(rule, drawn(([4, 2], 1, 0), ([4, 2], 2, 0))) == "passed"
    assert verdict(rule, drawn(([4, 2], 1, 0), ([4, 2], 1, 1))) == "passed", "of different steps"
    assert verdict(rule, drawn(([4, 2], 1, 0), ([9, 9], 2, 0), ([4, 2], 1, 0))) == "failed"
    assert verdict(rule, drawn(([4, 2], 1, 0), ([4, 3], 1, 0))) == "failed", "shapes with a third in common"
    assert verdict(rule, drawn(([4, 2], 1, 0), ([5, 3], 1, 0))) == "passed"


def test_consistency_compares_values_that_live_together(verdict: Verdict) -> None:
    rule = invariant(
        "ConsistencyRelation",
        var("data"),
        var("data"),
        precondition=when(clause("unequal", "process_id"), clause("consistent", "attributes.ndim")),
    )

    def replica(pid: int, *values: int, ndim: int = 1) -> Log:
        log = Log(pid=pid, thread=pid, start=1000 + pid % 10)
        for v in values:
            log.state("model.w", data=v, ndim=ndim)
            log.time += 1000
        log.call(STEP)
        return log

    assert verdict(rule, replica(101, 1, 2, 3), replica(102, 1, 2, 3)) == "passed"
    assert verdict(rule, replica(101, 1, 2, 3), replica(102, 1, 5, 3)) == "failed"
    assert verdict(rule, replica(101, 1, 2, 3), replica(102, 1, 5, 3, ndim=2)) == "idle"
    assert verdict(rule, replica(101, 1, 2, 3)) == "idle"


def test_consistency_is_not_asked_of_a_type_that_lacks_the_attribute(verdict: Verdict) -> None:
    rule = invariant("ConsistencyRelation", var("data"), var("data"))
    log = Log()
    for name, attributes in (("a", {"data": 1}), ("b", {"data": 2})):
        log.state(name, **attributes)
    log.call(STEP)
    assert verdict(rule, log) == "failed"
    log.state("c", ndim=1)
    log.call(STEP)
    assert verdict(rule, log) == "idle"


def test_output_is_a_constant_of_every_returned_tensor(verdict: Verdict) -> None:
    rule = invariant("ConsistentOutputRelation", api("torch.f"), var("shape", "torch.Tensor", const_value=[4, 2]))
    for returns, expected in (
        (tensor(), "passed"),
        ([tensor(), tensor(shape=[4, 3])], "failed"),
        ({"int": 3}, "failed"),
        (tensor(shape=[2]), "failed"),
    ):
        log = Log()
        log.call("torch.f", returns=returns)
        log.call("torch.f", raises="ValueError")
        assert verdict(rule, log) == expected


def test_input_output_says_nothing_where_a_value_is_missing(verdict: Verdict) -> None:
    rule = invariant(
        "ConsistentInputOutputRelation",
        value(["shape", 0], taken=True, index=1),
        api("torch.f"),
        value(["shape", 0], taken=False),
    )
    for shapes, expected in (([[1], [4, 2]], "passed"), ([[1], [3]], "failed"), ([[4]], "idle")):
        log = Log()
        log.call("torch.f", args={str(i): tensor(shape=s) for i, s in enumerate(shapes)}, returns=tensor())
        assert verdict(rule, log) == expected


def test_threshold_compares_a_result_with_an_argument(verdict: Verdict) -> None:
    most = value([], taken=True, name="max")
    rule = invariant("ThresholdRelation", {**most, "additional_path": None}, api("torch.f"), value(["shape", 1], taken=False))
    for bound, expected in ((2, "passed"), (1, "failed"), ("x", "unknown")):
        log = Log()
        log.call("torch.f", kwargs={"max": {"int": bound}}, returns=tensor())
        assert verdict(rule, log) == expected


def test_what_a_thread_recorded_after_a_torn_call_is_left_out(verdict: Verdict) -> None:
    rule = invariant("APIContainRelation", api(STEP), api(ADD))
    log = Log()
    log.call(ZERO)
    with log.inside(STEP):
        log.call(ADD)
    log.call(ZERO)
    with log.inside(STEP):
        log.call(ZERO)
    del log.records[-1]  # killed inside the last step
    assert verdict(rule, log) == "passed"


def test_rules_do_not_apply_to_runs_of_our_own(tmp_path: Path) -> None:
    from helpers.processes import process
    from helpers.runs import write_run

    run = write_run(tmp_path / "run", [process()])
    rules = [convert(invariant("FunctionCoverRelation", api("m.a"), api("m.b")))]
    assert check(Trace.load([run]), [Pack(rules)]).not_triggered == 1
