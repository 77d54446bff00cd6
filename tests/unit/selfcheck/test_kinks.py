"""A unit that rounding turns is no verdict; a gradient that is wrong at an edge is one."""

from __future__ import annotations

import contextlib

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from proctor.oracle.selfcheck import Unknown, registry  # noqa: E402
from proctor.oracle.selfcheck.watching.chance import refuse_kinks  # noqa: E402
from proctor.oracle.selfcheck.watching.fork import random_states  # noqa: E402
from proctor.oracle.selfcheck.watching.gaps import Gap  # noqa: E402
from proctor.oracle.selfcheck.watching.step import Call  # noqa: E402


def edge() -> torch.Tensor:
    """Three numbers whose sum is above zero in float64 and is not in float32, or the other way round."""
    torch.manual_seed(0)
    while True:
        a, b = torch.rand(2)
        x = torch.stack([a, b, -(a + b)])
        if (nn.functional.linear(x[None], torch.ones(1, 3)) > 0) != (x.double().sum() > 0):
            return x


class Net(nn.Module):
    def __init__(self, short: bool = False, first: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.add, self.relu, self.last, self.short = nn.Linear(3, 1, bias=False), nn.ReLU(), nn.Linear(1, 2), short
        self.first = nn.Identity() if first else None
        nn.init.ones_(self.add.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.relu(self.add(x if self.first is None else self.first(x)))
        return self.last(h.half().to(x.dtype) if self.short else h)


def call_of(module: nn.Module, x: torch.Tensor) -> Call:
    call = Call(module, "Net", (x,), {}, random_states(), True)
    call.gradients = {"": torch.ones(len(x), 2) / len(x)}
    return call


def test_a_unit_that_rounding_turns_is_undecided():
    x = torch.cat([edge()[None], torch.randn(7, 3, generator=torch.Generator().manual_seed(2))])
    call = call_of(Net(), x)
    slopes = call.derive()[1]
    wide = call_of(Net().double(), x.double()).derive(dtype=torch.float64)[1]
    error = float((wide["add.weight"] - slopes["add.weight"]).norm() / slopes["add.weight"].norm())
    assert error > 1e-3  # one sample of eight counts in one of them alone
    with pytest.raises(Unknown, match="kink"):
        refuse_kinks(call, slopes, Gap("add.weight", error, 1e-6, error / 1e-6), lambda: call.derive()[1])
    with contextlib.suppress(Unknown):  # where four samples of noise turn the unit as well
        assert registry()["precision"].check(call_of(Net(), x)).verdict == "equivalent"


class Functions(nn.Module):
    """The same sum, with nothing inside at whose edge noise could be put."""

    def __init__(self) -> None:
        super().__init__()
        self.ones, self.last = nn.Parameter(torch.ones(1, 3)), nn.Parameter(torch.tensor([[0.3, -0.7]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.ones).relu() @ self.last


@pytest.mark.parametrize("make", [lambda: Net(first=False), Functions])
def test_a_unit_that_meets_the_inputs_is_undecided(make):
    x = torch.cat([edge()[None], torch.randn(7, 3, generator=torch.Generator().manual_seed(2))])
    call = call_of(make(), x)
    before = {n: p.detach().clone() for n, p in call.module.named_parameters()}
    with pytest.raises(Unknown, match="kink"):
        registry()["precision"].check(call)
    assert call.args[0] is x and all(torch.equal(p, before[n]) for n, p in call.module.named_parameters())


@pytest.mark.parametrize("at_edge", [False, True])
def test_a_type_that_is_too_short_is_told(at_edge):
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(2))
    if at_edge:
        x[0] = edge()
    assert registry()["precision"].check(call_of(Net(short=True), x)).verdict == "different"


def test_what_noise_does_not_move_is_not_refused():
    call = call_of(Net(), torch.randn(8, 3, generator=torch.Generator().manual_seed(2)))
    slopes = call.derive()[1]
    refuse_kinks(call, slopes, Gap("add.weight", 1e-3, 1e-6, 1e3), lambda: call.derive()[1])
    refuse_kinks(call, slopes, Gap("another", 1e-3, 1e-6, 1e3), lambda: call.derive()[1])
