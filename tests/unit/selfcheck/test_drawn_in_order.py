"""A model that sorts its samples gives each another part of what it draws: no verdict on its neighbours, unless they matter with the same draw for all."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from proctor.oracle.selfcheck import Unknown, registry  # noqa: E402
from proctor.oracle.selfcheck.outcomes import Outcome  # noqa: E402
from proctor.oracle.selfcheck.watching.chance import OneForAll, draws  # noqa: E402
from proctor.oracle.selfcheck.watching.fork import random_states  # noqa: E402
from proctor.oracle.selfcheck.watching.step import Call  # noqa: E402


class Sorted(nn.Module):
    """Samples are sorted, drawn for, and put back, as packing by lengths does."""

    def __init__(self, mixed: bool = False, noise: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.one, self.two, self.mixed, self.noise = nn.Linear(6, 8), nn.Linear(8, 3), mixed, noise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = x[:, 0].argsort()
        hidden = torch.tanh(self.one(x[order]))
        hidden = hidden - hidden.mean(0) if self.mixed else hidden
        drawn = torch.randn(len(x), 8) if self.noise else 0.0
        return self.two(hidden + self.noise * drawn)[order.argsort()]


def call_of(module: nn.Module) -> Call:
    torch.manual_seed(1)
    x = torch.randn(7, 6)
    call = Call(module, "Sorted", (x,), {}, random_states(), True)
    call.results = {"": ((7, 3), torch.float32)}
    call.gradients = {"": torch.ones(7, 3) / 7}
    return call


def neighbours(module: nn.Module) -> Outcome:
    return registry()["neighbours"].check(call_of(module))


def test_a_sample_that_gets_other_random_numbers_since_others_are_sorted_before_it_is_undecided() -> None:
    with pytest.raises(Unknown, match="which of them a sample gets"):
        neighbours(Sorted())


def test_what_mixes_samples_is_told_in_spite_of_random_numbers() -> None:
    assert neighbours(Sorted(mixed=True)).verdict == "different"


def test_who_sorts_and_draws_nothing_is_equivalent() -> None:
    assert neighbours(Sorted(noise=0.0)).verdict == "equivalent"
    assert not draws(call_of(Sorted(noise=0.0))) and draws(call_of(Sorted()))


def test_one_draw_is_for_all_samples_and_no_more_behind_it() -> None:
    with OneForAll(7):
        rows, others = torch.randn(7, 3), torch.rand(5, 3)
        filled = torch.empty(2, 7).uniform_()
    assert bool((rows == rows[0]).all()) and bool((filled == filled[:, :1]).all())
    assert not bool((others == others[0]).all()) and not bool((torch.randn(7, 3)[0] == torch.randn(7, 3)[1]).all())
