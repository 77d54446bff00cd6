"""A model whose forward is called by its name is seen as a whole, and a copy of it stays a copy."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from proctor.oracle.selfcheck.facts import CheckConfig  # noqa: E402
from proctor.oracle.selfcheck.watching.watch import Watch  # noqa: E402


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x, scale=1.0):
        return self.two(torch.tanh(self.one(x))) * scale


class Set(nn.Module):
    """Holds its batch."""

    def __init__(self):
        super().__init__()
        self.net = Model()
        self.batch = torch.randn(4, 3)

    def forward(self):
        return self.net(self.batch)


@pytest.fixture
def watch(tmp_path: Path):
    found = Watch(CheckConfig(str(tmp_path), skip=("resume", "saved"), step=100))
    found.install()
    yield found
    found.remove()


def update(model, optimizer, call):
    optimizer.zero_grad()
    call(torch.randn(4, 3)).pow(2).mean().backward()
    optimizer.step()


def test_a_forward_that_is_called_by_its_name_is_a_call_of_the_model(watch):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = Model.forward
    for _ in range(3):
        update(model, optimizer, model.forward)
    assert [c.name for c in watch.calls] == ["Model"] and list(watch.roots.values()) == [model]
    assert set(watch.calls[0].gradients) == {""} and [n for n, _ in watch.calls[0].named_inputs.values()] == ["x"]
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.one.weight.zero_(), other.one.bias.zero_(), other.two.bias.zero_()
    assert not bool(other.forward(torch.randn(2, 3)).any())
    watch.remove()
    assert Model.forward is before


def test_a_model_that_is_called_as_one_is_not_touched(watch):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = Model.forward
    for _ in range(2):
        update(model, optimizer, model)
    assert Model.forward is before and [c.name for c in watch.calls] == ["Model"]


def test_a_set_of_models_without_inputs_is_no_model(watch):
    model = Set()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        update(model, optimizer, lambda _: model.forward())
    assert [c.name for c in watch.calls] == ["Model"] and list(watch.roots.values()) == [model.net]
