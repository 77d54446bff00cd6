"""Whether a forward in evaluation mode trains shows at the backward behind it."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

from proctor.instrument.steps.modes import KEPT, TrainsInEval


@pytest.fixture
def modes() -> TrainsInEval:
    return TrainsInEval()


def backward(modes: TrainsInEval, loss: torch.Tensor) -> bool:
    modes.backward_begins()
    loss.backward()
    return modes.backward_ends()


def test_a_model_whose_gradients_a_backward_adds_to_trains_from_then_on(modes: TrainsInEval) -> None:
    model = nn.Linear(2, 1).eval()
    assert not modes.called(model), "nothing is known of it"
    assert backward(modes, model(torch.ones(3, 2)).sum())
    assert modes.called(model)
    assert not backward(modes, model(torch.ones(3, 2)).sum()), "it is no news"


def test_a_gradient_that_is_added_in_place_counts(modes: TrainsInEval) -> None:
    model = nn.Linear(2, 1).eval()
    model(torch.ones(3, 2)).sum().backward()
    modes.called(model)
    assert backward(modes, model(torch.ones(3, 2)).sum())


def test_an_evaluation_with_gradients_does_not_train(modes: TrainsInEval) -> None:
    model = nn.Linear(2, 1)
    for _ in range(3):
        assert modes.called(model.train())
        assert not backward(modes, model(torch.ones(3, 2)).sum())
        assert not modes.called(model.eval())


def test_the_backward_of_another_model_says_nothing_and_that_of_its_own_may_come_later(modes: TrainsInEval) -> None:
    generator, critic = nn.Linear(2, 2).eval(), nn.Linear(2, 1)
    made = generator(torch.ones(3, 2))
    assert (modes.called(generator), modes.called(critic)) == (False, True)
    assert not backward(modes, critic(made.detach()).sum())
    assert backward(modes, critic(made).sum())
    assert modes.called(generator)


def test_parts_that_train_in_training_mode_do_not_make_an_evaluation_of_the_whole_one_that_trains(modes: TrainsInEval) -> None:
    whole = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).eval()
    part = whole[0].train()
    assert not modes.called(whole)
    assert modes.called(part)
    assert not backward(modes, part(torch.ones(3, 2)).sum())
    assert not modes.called(whole)


def test_training_mode_ends_it(modes: TrainsInEval) -> None:
    model = nn.Linear(2, 1).eval()
    modes.called(model)
    backward(modes, model(torch.ones(3, 2)).sum())
    assert modes.called(model.train())
    assert not modes.called(model.eval())


def test_parameters_that_do_not_train_and_models_that_are_gone_are_no_error(modes: TrainsInEval) -> None:
    frozen, gone, model = nn.Linear(2, 2).eval().requires_grad_(False), nn.Linear(2, 1).eval(), nn.Linear(2, 1)
    for each in (frozen, gone, model):
        modes.called(each)
    modes.backward_begins()
    del gone, each
    gc.collect()
    model(frozen(torch.ones(3, 2))).sum().backward()
    assert not modes.backward_ends()


def test_few_models_are_kept_and_none_is_kept_alive(modes: TrainsInEval) -> None:
    models = [nn.Linear(2, 1).eval() for _ in range(KEPT + 4)]
    for model in models:
        modes.called(model)
    assert not backward(modes, models[0](torch.ones(3, 2)).sum()), "the oldest were let go"
    assert backward(modes, models[-1](torch.ones(3, 2)).sum())
    copies = copy.deepcopy(models)
    for model in copies:
        modes.called(model)
    del copies, model
    gc.collect()
    assert not backward(modes, models[1](torch.ones(3, 2)).sum())


def train(modes: TrainsInEval, model: nn.Module) -> tuple[bool, bool]:
    """One place at which a model is called for training."""
    training = modes.called(model)
    return training, backward(modes, model(torch.ones(3, 2)).sum())


def evaluate(modes: TrainsInEval, model: nn.Module, *, grad: bool) -> None:
    for _ in range(3):
        assert not modes.called(model.eval(), grad)


@pytest.mark.parametrize("grad", [False, True])
def test_who_forgets_to_set_it_to_train_again_trains_at_once_where_it_trained_before(modes: TrainsInEval, *, grad: bool) -> None:
    model = nn.Linear(2, 1)
    assert train(modes, model) == (True, False)
    evaluate(modes, model, grad=grad)
    assert train(modes, model)[0]
    assert train(modes, model) == (True, False), "and it is known to"


@pytest.mark.parametrize("grad", [False, True])
def test_a_place_that_trains_and_evaluates_tells_nothing(modes: TrainsInEval, *, grad: bool) -> None:
    model, places = nn.Linear(2, 1), []
    for mode, gradients in ((True, True), (False, grad), (True, True), (False, True)):
        if len(places) == 3:
            evaluate(modes, model, grad=False)
        places.append(modes.called(model.train(mode), gradients))
    assert places == [True, False, True, False]


def test_a_guess_that_no_backward_confirms_is_made_once(modes: TrainsInEval) -> None:
    model, guesses = nn.Linear(2, 1), []
    for mode in (True, False, True, False):
        if not mode:
            evaluate(modes, model, grad=False)
        guesses.append(modes.called(model.train(mode)))
    assert guesses == [True, True, True, False]
