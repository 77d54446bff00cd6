"""What tensors that cross an edge of a module are called."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.utils import _pytree as pytree  # noqa: E402

from proctor.oracle.collect.edges.slots import named  # noqa: E402


class Pooled:
    """Two tensors, registered as TorchRec registers its `KeyedTensor`: without names of its parts."""

    def __init__(self, one: torch.Tensor, two: torch.Tensor) -> None:
        self.one, self.two = one, two


pytree.register_pytree_node(Pooled, lambda p: ([p.one, p.two], None), lambda parts, _: Pooled(*parts))


def test_parts_of_a_class_without_names_for_them_are_numbered() -> None:
    a, b, c = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    assert list(named({"pooled": Pooled(a, b), "dense": c}, "output")) == ["pooled.0", "pooled.1", "dense"]
    assert list(named(Pooled(a, b), "output")) == ["0", "1"]
    found = named(((Pooled(a, b), c), {"weight": c}), "input")
    assert list(found) == ["0.0", "0.1", "1", "weight"] and found["0.1"] is b
