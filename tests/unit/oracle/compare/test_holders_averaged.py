"""Holders, the reverse: gradients of ranks whose parameters are averaged decide nothing, nor do those of other rows."""

from __future__ import annotations

from proctor.oracle.judging.holders import averaged_later, of_other_rows
from proctor.oracle.judging.verdicts import ReplicaConflict, TensorVerdict, failing

PARTIAL = "partial mean: the mean over axis rank is the reference, an average over them is missing"


def gradient(name: str, note: str = PARTIAL) -> TensorVerdict:
    return TensorVerdict(kind="main_grad", name=name, verdict="bad", ratio=1e6, note=note)


def after(name: str, right: bool = True) -> TensorVerdict:
    return TensorVerdict(kind="param_after", name=name, verdict="ok" if right else "bad")


def apart(kind: str, name: str) -> ReplicaConflict:
    return ReplicaConflict(kind=kind, name=name, axis="rank", ranks=(0, 1))


def test_gradients_of_ranks_whose_parameters_are_averaged_decide_nothing() -> None:
    tensors, replicas, said = averaged_later([gradient("w"), after("w")], [apart("main_grad", "w")], lambda step, name: True)
    assert not any(map(failing, tensors)) and not replicas and "averaged" in said[0]


def test_gradients_decide_where_parameters_are_wrong_or_part_or_nothing_says_that_they_are_parts() -> None:
    for tensors, replicas in (
        ([gradient("w"), after("w", right=False)], [apart("main_grad", "w")]),
        ([gradient("w"), after("w")], [apart("main_grad", "w"), apart("param_after", "w")]),
        ([gradient("w", "gradient scale 2"), after("w")], [apart("main_grad", "w")]),
        ([gradient("w")], [apart("main_grad", "w")]),
        ([gradient("w"), after("w")], []),  # the same on all ranks
    ):
        assert averaged_later(tensors, replicas, lambda step, name: True) == (tensors, replicas, [])
    held = [gradient("w"), after("w")], [apart("main_grad", "w")]
    assert averaged_later(*held, lambda step, name: False) == (*held, [])


def test_gradients_of_a_module_that_is_called_less_often_are_of_other_rows() -> None:
    pieces = {(0, 0, "output", "a", ""): 1, (0, 0, "grad_output", "a", ""): 1, (0, 0, "output", "b", ""): 1, (0, 1, "output", "b", ""): 1, (0, 1, "grad_output", "b", ""): 1}
    assert of_other_rows(pieces, {"a": 2, "b": 2}) == {(0, 0, "grad_output", "a", "")}
