"""Results that are broadcast against targets of another shape are seen; pairs that an author asks for are not told."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from proctor.instrument.patch.replaced import Replaced  # noqa: E402
from proctor.oracle.selfcheck.watching.seen.pairs import Pairs  # noqa: E402


@pytest.fixture
def pairs():
    found, attached = Pairs(lambda f: f, lambda: found.outermost), Replaced()
    found.outermost = None
    before = {n: getattr(torch.Tensor, n) for n in ("__sub__", "__rmul__", "mul")}
    found.install(attached)
    yield found
    attached.remove()
    assert all(getattr(torch.Tensor, n) is f for n, f in before.items()) and "__sub__" not in vars(torch.Tensor)


def column():
    return nn.Linear(3, 1)(torch.randn(6, 3))


Y = torch.arange(6.0)

WRONG = {
    "difference": lambda: (column() - Y).pow(2).mean(),
    "turned": lambda: (Y - column()).pow(2).mean(),
    "function": lambda: torch.sub(Y, column()).abs().mean(),
    "product": lambda: (column().squeeze(1) * (Y.reshape(6, 1) * 2)).mean(),
    "integers": lambda: (column() - Y.long()).abs().mean(),
    "loss": lambda: F.mse_loss(column(), Y),
    "loss of a module": lambda: nn.SmoothL1Loss()(column().squeeze(1), Y.unsqueeze(1)),
    "more axes": lambda: (column().reshape(1, 6, 1) * 2 - Y.reshape(1, 6) * 2).pow(2).mean(),
}
RIGHT = {
    "same shape": lambda: (column().squeeze(1) - Y).pow(2).mean(),
    "one number": lambda: (column() - Y[:1]).pow(2).mean(),
    "a row for all": lambda: (nn.Linear(3, 6)(torch.randn(6, 3)) - Y).pow(2).mean(),
    "asked for": lambda: (column().squeeze(1)[:, None] - Y).pow(2).mean(),
    "asked for, targets": lambda: (Y[:, None] - column().squeeze(1)).pow(2).mean(),
    "quantiles": lambda: (column()[None] - Y[:, None, None]).pow(2).mean(),
    "both are results": lambda: (lambda c: (c - c.squeeze(1)).pow(2).mean())(column()),
    "a constant target": lambda: F.mse_loss(column(), torch.ones(6)),
    "a parameter": lambda: (nn.Parameter(torch.randn(6, 1)) - Y).pow(2).mean(),
    "no gradient": lambda: (column().detach() - Y).pow(2).mean(),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("name", WRONG)
def test_what_is_broadcast_to_all_pairs_is_seen(pairs, name):
    made = WRONG[name]()
    assert len(pairs.crossed) == 1 and sorted(n for n in pairs.crossed[0].one if n > 1) == [6] and pairs.crossed[0].line.startswith(__file__)
    assert made.requires_grad


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_meant_is_not_told(pairs, name):
    RIGHT[name]()
    assert not pairs.crossed


def test_inside_a_model_pairs_are_its_own_affair(pairs):
    pairs.outermost = nn.Linear(2, 2)
    WRONG["difference"]()
    assert not pairs.crossed
    pairs.outermost = nn.MSELoss()
    WRONG["difference"]()
    assert len(pairs.crossed) == 1


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_values_are_the_same_bits(pairs):
    x, y = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    assert torch.equal(x - y, torch.Tensor.add(x, -y)) and torch.equal(2 - x, -(x - 2)) and torch.equal(x * 2, 2 * x)
    with pytest.raises(TypeError):
        x - "a"
