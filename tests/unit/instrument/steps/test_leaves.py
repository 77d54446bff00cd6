"""Which tensors a backward is of, and when new tensors have taken the place of old ones."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
import torch

from proctor.instrument.steps.leaves import Lineage, inputs_of


def leaves(*tensors: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    return [(f"leaf.{i}", t) for i, t in enumerate(tensors)]


def test_what_has_moved_a_little_is_followed() -> None:
    lineage, w, b = Lineage(), torch.randn(4, 4), torch.zeros(4)
    assert lineage.follow(leaves(w, b)) == []
    new = w - 0.01 * torch.randn(4, 4), b - 0.01
    assert lineage.follow(leaves(*new)) == [id(w), id(b)]
    assert lineage.followed


def test_the_same_tensors_are_followed_by_none() -> None:
    lineage, w = Lineage(), torch.randn(4, 4)
    lineage.follow(leaves(w))
    w.sub_(0.1)
    assert lineage.follow(leaves(w)) == []


def test_another_batch_or_another_shape_takes_nobody_s_place() -> None:
    torch.manual_seed(0)
    lineage, w = Lineage(), torch.randn(8, 8)
    lineage.follow(leaves(w))
    assert lineage.follow(leaves(torch.randn(9, 8))) == []
    assert lineage.follow(leaves(w + 1.5 * torch.randn(8, 8))) == []
    assert not lineage.followed


def test_an_equal_copy_is_no_update() -> None:
    lineage, w = Lineage(), torch.randn(4)
    lineage.follow(leaves(w))
    assert lineage.follow(leaves(w.clone())) == []


def test_a_copy_of_a_model_beside_it_takes_nobody_s_place() -> None:
    lineage, w = Lineage(), torch.nn.Parameter(torch.randn(4, 4))
    copy = torch.nn.Parameter(w.detach().clone())
    for _ in range(3):  # two models, one after the other, and then both are updated by hand
        assert lineage.follow(leaves(w)) == []
        assert lineage.follow(leaves(copy)) == []
        with torch.no_grad():
            w.sub_(0.01)
            copy.sub_(0.01)
    assert not lineage.followed


def test_a_parameter_made_anew_in_each_step_is_followed() -> None:
    lineage, w = Lineage(), torch.nn.Parameter(torch.randn(4, 4))
    lineage.follow(leaves(w))
    gone, w = id(w), torch.nn.Parameter(w.detach() - 0.01)
    assert lineage.follow(leaves(w)) == [gone]


def test_penalties_in_between_do_not_hide_what_is_trained() -> None:
    lineage, w = Lineage(), torch.randn(4, 4)
    lineage.follow(leaves(w))
    lineage.follow(leaves(torch.randn(16, 2)))
    assert lineage.follow(leaves(w * 0.99)) == [id(w)]


def test_what_is_differentiated_by_is_found_in_a_function_transform() -> None:
    seen = []

    def loss(w: torch.Tensor) -> torch.Tensor:
        seen.extend(t for _, t in inputs_of((w.sum(), [w]), None))
        return (w * w).sum()

    w = torch.randn(3)
    torch.func.grad(loss)(w)
    assert [t.data_ptr() for t in seen] == [w.data_ptr()]
    assert inputs_of((), {"inputs": w})[0][1] is w
