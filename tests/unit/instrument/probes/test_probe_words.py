"""Words of a tensor that are true by chance are not said: a network's first results are nearly the same for all samples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from proctor.instrument.probes._words import words

SHARE, POSITIVE = "it lies within 0 and 1", "it is not negative"
X = torch.linspace(-1, 1, 64).requires_grad_()


@pytest.mark.parametrize(
    ("compute", "share", "positive"),
    [
        (lambda x: 0.4 + 0.02 * x, False, False),
        (lambda x: (0.1 * x).sigmoid().reshape(8, 8).t(), True, True),
        (lambda x: (0.1 * x - 3).sigmoid().reshape(16, 4).sum(1), False, True),
        (lambda x: (0.1 * x).exp() / 4, False, False),
        (lambda x: (0.1 * x - 1).exp(), False, True),
        (lambda x: x.square(), True, True),
        (lambda x: (0.4 + 0.02 * x).detach(), False, False),
        (lambda x: (x.detach() + 1) / 2, True, True),
        (lambda x: 0 * x.detach(), False, False),
    ],
)
def test_what_lies_on_one_side_by_what_made_it_or_up_to_the_border(compute: Callable[[torch.Tensor], torch.Tensor], share: bool, positive: bool) -> None:
    has, lacks = words(compute(X))
    assert (SHARE in has, POSITIVE in has) == (share, positive)
    assert not {SHARE, POSITIVE} & set(lacks)


def test_a_view_of_which_torch_tells_no_graph_is_read_all_the_same() -> None:
    base = torch.rand(4, 16)
    with torch.no_grad():
        view = base[1]
    base.mul_(torch.ones(16, requires_grad=True))
    with pytest.raises(RuntimeError):
        _ = view.grad_fn
    assert "it has more than one value" in words(view)[0]
