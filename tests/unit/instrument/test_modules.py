"""Wrappers have no name of their own: whatever stands around a model, its tensors are called as in the model alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from proctor.instrument.observe.modules import clean_names, unwrap


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.head = nn.Linear(2, 2)


class Around(nn.Module):
    """A wrapper that nobody knows: the model under a private name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._strategy_module = model


class Engine(nn.Module):
    """Holds the model bare, and in another wrapper."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._forward_module = nn.DataParallel(model)
        self._original_module = model


class Two(nn.Module):
    """Not a wrapper: the privately named module is one of two."""

    def __init__(self) -> None:
        super().__init__()
        self._student_model = nn.Linear(2, 2)
        self.teacher = nn.Linear(2, 2)


def names(root: nn.Module) -> set[str]:
    clean = clean_names(dict(root.named_modules(remove_duplicate=False)))
    found = set()
    for name, _ in root.named_parameters(remove_duplicate=False):
        path, _, kind = name.rpartition(".")
        found.add(f"{clean[path]}.{kind}".removeprefix("."))
    return found


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize(
    "wrap", [compiled, nn.DataParallel, Around, Engine, lambda m: compiled(nn.DataParallel(m)), lambda m: Around(compiled(m))]
)
def test_a_wrapped_model_has_the_names_of_the_model(wrap: Any) -> None:
    model = Net()
    expected = names(model)
    root = wrap(model)
    assert names(root) == expected
    assert unwrap(root)[0] is model


@pytest.mark.parametrize(("wrap", "kind"), [(nn.DataParallel, "dp"), (lambda m: compiled(nn.DataParallel(m)), "dp"), (compiled, ""), (Around, "")])
def test_threads_of_one_process_are_no_replicas_of_several(wrap: Any, kind: str) -> None:
    assert unwrap(wrap(Net()))[1] == kind


@pytest.mark.parametrize("wrap", [compiled, nn.DataParallel, Around])
def test_a_wrapped_part_has_the_names_of_the_part(wrap: Any) -> None:
    model = Net()
    expected = names(model)
    model.body = wrap(model.body)
    assert names(model) == expected


def test_a_module_that_holds_more_is_no_wrapper() -> None:
    model = Two()
    assert names(model) == {"_student_model.weight", "_student_model.bias", "teacher.weight", "teacher.bias"}
    assert unwrap(model)[0] is model


def test_a_copy_with_tensors_of_its_own_is_no_wrapper_but_called_alike() -> None:
    average = torch.optim.swa_utils.AveragedModel(Net())
    assert names(average) == names(Net())
    assert unwrap(average)[0] is average
