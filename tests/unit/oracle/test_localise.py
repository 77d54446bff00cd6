"""oracle/localise.py: from a run on the reference's values to the module that is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from proctor.oracle.localise import culprit
from proctor.oracle.verdicts import ReplicaConflict, TensorVerdict, Verdict

ORDER = {"a": 0.0, "b": 1.0, "c": 2.0}


def tensor(kind: str, name: str, *, wrong: bool = True, **more: Any) -> TensorVerdict:
    values: dict[str, Any] = {"rel_err": 0.1, "ratio": 50.0, "verdict": "bad" if wrong else "ok", "source": f"{name}.py:1", **more}
    return TensorVerdict(kind=kind, name=name, order=ORDER.get(name.split(".")[0], 9.0), **values)


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


def test_nothing_differs_alone() -> None:
    assert culprit(verdict(tensor("output", "b")), verdict(tensor("output", "b", wrong=False))) is None
