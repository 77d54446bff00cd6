"""What rules on state changes say: a claim for each view of `changes`, and for a failure what was expected, seen and to be looked at."""

from __future__ import annotations

from typing import Final

from proctor.invariants.relations.views import checkpoints as _checkpoints
from proctor.invariants.relations.views import frames as _frames

STEP: Final = "<step>"
ZERO_GRAD: Final = "torch.optim.Optimizer.zero_grad"

CLAIMS: Final = {
    (_frames.UPDATE, "data", "trainable"): "Optimizer.step changes every parameter of the optimizer that has a gradient",
    (STEP, "data", "trainable"): "a training step changes every parameter that got a gradient in it",
    (STEP, "data", "output"): "a training step that changes a model changes its output layer",
    (ZERO_GRAD, "grad", "trainable"): "Optimizer.zero_grad clears the gradient of every parameter that is trained",
    (_frames.UPDATE, "grad", "some"): "an optimizer that steps holds parameters that get gradients",
    (STEP, "data", "held"): "a parameter that gets gradients, in the midst of parameters that an optimizer holds, is held by one",
    (STEP, "data", "module"): "an optimizer holds all parameters of a layer that get gradients, or none",
    (STEP, "data", "twin"): "of several models of one class that get gradients an optimizer holds each, if it holds one",
    (STEP, "grad", "each"): "every trained parameter that always had a gradient has one when its optimizer steps",
    (_checkpoints.SAVE, "data", "saved"): "what is saved of a model holds all its parameters",
    (STEP, "grad", "input"): "the first layer of a model has a gradient of this step when its optimizer steps",
}
# function, expected, seen, advice
WORDS: Final = {
    (_frames.UPDATE, "data", "trainable"): (
        _frames.UPDATE,
        "Optimizer.step updates {name}, which has a gradient",
        "{name} did not change in Optimizer.step of step {step}",
        "Look at the learning rate of its parameter group, at what replaced {name} after the optimizer was built, and at step() overrides.",
    ),
    (STEP, "data", "trainable"): (
        _frames.UPDATE,
        "{name} changes in a step that gives it a gradient",
        "{name} never updated: it got a gradient in step {step} and did not change{cause}",
        "Check that Optimizer.step is called on this rank, and that the optimizer holds this very tensor (built before the model was wrapped, moved or replaced?).",
    ),
    (STEP, "data", "output"): (
        _frames.UPDATE,
        "Optimizer.step changes the output layer ({name})",
        "{name} of the output layer did not change in step {step}{cause}",
        "Check requires_grad of {name} and whether it was given to the optimizer.",
    ),
    (ZERO_GRAD, "grad", "trainable"): (
        ZERO_GRAD,
        "Optimizer.zero_grad clears {name}.grad",
        "{name}.grad kept its value through Optimizer.zero_grad of step {step}",
        "The optimizer may hold other tensors than the model: was it built before the model was wrapped, moved or replaced?",
    ),
    (_checkpoints.SAVE, "data", "saved"): (
        _checkpoints.SAVE,
        "{name} is in what torch.save writes of the model",
        "{name} is missing in the state that was saved in step {step}",
        "Look at how {slot} collects the state: a filter on requires_grad, or on what the optimizer holds, leaves parameters out.",
    ),
    (_frames.UPDATE, "grad", "some"): (
        _frames.UPDATE,
        "Optimizer.step updates parameters that have gradients, such as {name}",
        "no parameter of the optimizer has a gradient in step {step}, while {name}, which no optimizer holds, has one and did not change",
        "The optimizer holds other tensors than the model uses: it was given the parameters of another module, or built before the model was wrapped, flattened, moved or replaced.",
    ),
    (STEP, "data", "held"): (
        _frames.UPDATE,
        "{name}, which gets gradients, is in an optimizer",
        "{name} never updated: it got a gradient in step {step} and no optimizer holds it, while most of the model is held",
        "Add it to a parameter group; if it was replaced after the optimizer was built (a new head, a resize, a wrapper), build the optimizer later.",
    ),
    (STEP, "data", "module"): (
        _frames.UPDATE,
        "{name}, which gets gradients, is in an optimizer as others of its layer are",
        "{name} never updated: it got a gradient in step {step} and no optimizer holds it, while one holds others of its layer",
        "Add it to a parameter group, or freeze it (requires_grad=False) if it is not to train.",
    ),
    (STEP, "data", "twin"): (
        _frames.UPDATE,
        "{name} is in an optimizer, as it is of another model of its class",
        "{name} never updated: it got a gradient in step {step} and no optimizer holds it, while one holds another model of its class",
        "Give the parameters of this model to an optimizer, too; if it is not to train, compute what it gives under torch.no_grad or freeze it (requires_grad=False).",
    ),
    (STEP, "grad", "each"): (
        "torch.Tensor.backward",
        "backward gives {name} a gradient in every step",
        "{name} got no gradient in step {step} and its optimizer stepped",
        "Look for a detach, no_grad, a branch that skips its module, or a zero_grad between backward and the update.",
    ),
    (STEP, "grad", "input"): (
        "torch.Tensor.backward",
        "backward gives {name} a gradient in every step",
        "{name} got no gradient in step {step} and its optimizer stepped",
        "Look for a detach, no_grad, or an output that the loss does not use, between {name} and the loss.",
    ),
}
