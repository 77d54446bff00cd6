"""Parameters that are no layer's are cut where that computes what one device computes, and else stay whole with a word."""

import pytest
import torch
from torch import nn

from proctor.oracle.parallel.deriving import derive


class Matrices(nn.Module):
    """Two matrices that a module multiplies itself, the first as [inputs, outputs]."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(8, 16)), nn.Parameter(torch.randn(8, 16))
        self.shift, self.scale = nn.Parameter(torch.randn(16)), nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x + torch.nn.functional.linear(torch.relu(x @ self.up + self.shift), self.down) * self.scale.square().mean()


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up, self.down = nn.Parameter(torch.randn(3, 24, 8) / 3), nn.Parameter(torch.randn(3, 8, 12) / 3)
        self.router = nn.Linear(8, 3)

    def forward(self, x):
        said = torch.softmax(self.router(x), -1)
        gate, up = torch.einsum("bi,eoi->beo", x, self.gate_up).chunk(2, -1)
        return torch.einsum("bei,eoi,be->bo", torch.relu(gate) * up, self.down, said)


class Added(nn.Module):
    """A bias that every rank would add."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.shift = nn.Parameter(torch.randn(16, 8)), nn.Parameter(torch.randn(8, 16)), nn.Parameter(torch.randn(8))

    def forward(self, x):
        return torch.relu(x @ self.up.T) @ self.down.T + self.shift


def found(inner, mesh="dp=2,tp=2"):
    torch.manual_seed(0)
    return derive(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), inner()), torch.randn(4, 8), mesh)


def cuts(derived, name):
    layout = derived.plan.param_layout(name)
    return str(layout.cuts[0]) if layout is not None and layout.cuts else ""


def test_experts_with_their_router_inside_are_cut_along_their_inner_width():
    derived = found(Inner)
    assert derived.apart == ()
    assert (cuts(derived, "2.gate_up"), cuts(derived, "2.down")) == ("tp:interleaved:1:2", "tp:2")
    assert any(rule.axes == ("tp",) and "router" in rule.path for rule in derived.plan.pendings)


def test_a_module_that_adds_more_than_its_matrices_stays_whole_and_says_why():
    derived = found(Added)
    assert derived.apart == () and not cuts(derived, "2.up")
    assert any("up|down|shift" in note and "stays whole" in note for note in derived.notes)


def test_matrices_whose_result_is_no_sum_of_parts_stay_whole():
    derived = found(Matrices)  # x is added inside, on every rank
    assert derived.apart == () and not cuts(derived, "2.up")


@pytest.mark.parametrize("odd", [1, 3])
def test_a_layer_that_cannot_be_cut_does_not_keep_the_layers_after_it_whole(odd):
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down, self.gate = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, odd)

        def forward(self, x):
            return x + self.gate(x).mean(-1, keepdim=True) * self.down(torch.relu(self.up(x)))

    torch.manual_seed(0)
    derived = derive(nn.Sequential(Gated(), Gated()), torch.randn(4, 8), "tp=2")
    assert derived.apart == () and cuts(derived, "1.up.weight") and cuts(derived, "0.down.weight")


class Sinks(nn.Module):
    """A number for each head, beside layers that are cut."""

    def __init__(self):
        super().__init__()
        self.q, self.v, self.o, self.sink = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8), nn.Parameter(torch.randn(4))

    def forward(self, x):
        q, v = (layer(x).unflatten(-1, (-1, 4)) for layer in (self.q, self.v))
        score = torch.cat([(q * v).sum(-1), self.sink.expand(len(x), -1)], -1).view(len(x), 2, -1).softmax(1)[:, 0]
        return self.o((score.unsqueeze(-1) * v).flatten(-2))


def test_a_number_for_each_head_is_cut_with_the_heads():
    torch.manual_seed(0)
    derived = derive(Sinks(), torch.randn(4, 8), "dp=2,tp=2")
    assert derived.apart == ()
    assert (cuts(derived, "sink"), cuts(derived, "o.weight")) == ("tp:0", "tp:1")
    assert not any("sink" in rule.path and rule.axes == ("tp",) for rule in derived.plan.pendings)
