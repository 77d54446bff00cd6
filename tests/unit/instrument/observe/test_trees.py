"""Modules, parameters and buffers below a module: as torch gives them, whatever the program's class does."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from proctor.instrument.observe import plainly as trees  # noqa: E402


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.again = self.one[0]
        self.none = None
        self.register_module("absent", None)
        self.register_parameter("nothing", None)
        self.scale = nn.Parameter(torch.ones(2))
        self.tied = nn.Linear(3, 4)
        self.tied.weight = self.one[0].weight
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 1), "b": nn.ModuleList([nn.Linear(4, 2)])})
        self.register_buffer("seen", torch.zeros(2))
        self.heads["a"].register_buffer("same", self.seen)


class Fewer(Net):
    def parameters(self) -> Any:  # type: ignore[override]
        raise AssertionError("code of the program's ran")

    named_parameters = modules = named_modules = buffers = named_buffers = children = named_children = parameters  # type: ignore[assignment]


def same(ours: Any, theirs: Any) -> bool:
    return [(name, id(thing)) for name, thing in ours] == [(name, id(thing)) for name, thing in theirs]


def built(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "normed":
        return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.LazyLinear(2))
    return torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))) if kind == "script" else nn.Sequential(Net(), nn.LSTM(3, 4)) if kind == "nested" else Net()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("kind", ["net", "nested", "normed", "script"])
def test_all_is_as_torch_gives_it(kind: str) -> None:
    model = built(kind)
    if kind == "script":  # each reading makes other Python objects of the same tensors
        assert [n for n, _ in trees.named_parameters(model)] == [n for n, _ in model.named_parameters()]
        assert [n for n, _ in trees.named_buffers(model)] == [n for n, _ in model.named_buffers()]
        assert [n for n, _ in trees.named_modules(model)] == [n for n, _ in model.named_modules()]
        return
    for once in (True, False):
        assert same(trees.named_modules(model, remove_duplicate=once), model.named_modules(remove_duplicate=once))
        assert same(trees.named_parameters(model, remove_duplicate=once), model.named_parameters(remove_duplicate=once))
        assert same(trees.named_buffers(model, remove_duplicate=once), model.named_buffers(remove_duplicate=once))
    assert [*map(id, trees.modules(model))] == [*map(id, model.modules())]
    assert [*map(id, trees.parameters(model))] == [*map(id, model.parameters())]


def test_methods_of_the_program_do_not_run() -> None:
    torch.manual_seed(0)
    plain, fewer = Net(), Fewer()
    assert [n for n, _ in trees.named_parameters(fewer)] == [n for n, _ in plain.named_parameters()]
    assert [n for n, _ in trees.named_modules(nn.Sequential(fewer))] == [n for n, _ in nn.Sequential(plain).named_modules()]
    assert [n for n, _ in trees.named_buffers(fewer)] == [n for n, _ in plain.named_buffers()]


def test_a_module_that_holds_itself_ends() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    model[1].register_module("whole", model)
    model[1].register_module("self", model[1])
    for once in (True, False):
        assert [n for n, _ in trees.named_modules(model, remove_duplicate=once)] == ["", "0", "1", "1.0"]
