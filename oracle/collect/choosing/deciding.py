"""Which functions of torch decide something, and where they are told how: what drops elements, what chooses among scores."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F


class Argument(NamedTuple):
    """An argument of a function by position and by name, with what it is where it is not given."""

    at: int
    name: str
    default: Any = None

    def of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What a call gives."""
        return args[self.at] if len(args) > self.at else kwargs.get(self.name, self.default)

    def put(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call's arguments with another value."""
        if len(args) > self.at:
            return (*args[: self.at], value, *args[self.at + 1 :]), dict(kwargs)
        return args, {**kwargs, self.name: value}


_NOWHERE: Final = 1 << 16  # position of what is given by name, or not at all


class Dropout(NamedTuple):
    """How a function is told what to drop.

    Args:
        name: of its slot.
        p: its probability.
        training: whether it drops at all; `None` if it always does.
        elementwise: its result for ones tells the mask.
        inplace: whether its argument is its result.
        scales: elements that stay are multiplied by 1/(1 − p), the others by 0.
    """

    name: str
    p: Argument
    training: Argument | None = None
    elementwise: bool = True
    inplace: Argument = Argument(_NOWHERE, "inplace", False)
    scales: bool = False


class Choice(NamedTuple):
    """How a function is told where to choose: along `dim`, of `None` in all elements."""

    name: str
    dim: Argument


INPUT: Final = Argument(0, "input")


def _python(function: Any, name: str, p: str = "p", *, elementwise: bool = True, scales: bool = False) -> Dropout:
    parameters = inspect.signature(function).parameters
    places = list(parameters)
    here = {n: Argument(places.index(n), n, parameters[n].default) for n in (p, "training", "inplace") if n in places}
    return Dropout(name, here[p], here["training"], elementwise, here.get("inplace", Argument(_NOWHERE, "inplace", False)), scales)


DROPOUTS: Final[dict[Any, Dropout]] = {
    **{function: _python(function, "dropout", scales=True) for function in (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)},
    **{function: _python(function, "dropout") for function in (F.alpha_dropout, F.feature_alpha_dropout)},
    **{
        function: Dropout("dropout", Argument(1, "p"), Argument(2, "train"), scales=function in (torch.dropout, torch.native_dropout))
        for function in (torch.dropout, torch.native_dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout)
    },
    **{
        function: Dropout(
            "dropout", Argument(1, "p"), Argument(2, "train"), inplace=Argument(_NOWHERE, "inplace", True), scales=function is torch.dropout_
        )
        for function in (torch.dropout_, torch.alpha_dropout_, torch.feature_dropout_, torch.feature_alpha_dropout_)
    },
    F.scaled_dot_product_attention: Dropout("attention", Argument(4, "dropout_p", 0.0), None, elementwise=False),
    F.multi_head_attention_forward: _python(F.multi_head_attention_forward, "attention", "dropout_p", elementwise=False),
}
RECURRENT: Final = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
BERNOULLI: Final = (torch.bernoulli, torch.Tensor.bernoulli, torch.Tensor.bernoulli_)
CHOICES: Final[dict[Any, Choice]] = {
    torch.topk: Choice("topk", Argument(2, "dim", -1)),
    torch.Tensor.topk: Choice("topk", Argument(2, "dim", -1)),
    torch.argmax: Choice("argmax", Argument(1, "dim")),
    torch.Tensor.argmax: Choice("argmax", Argument(1, "dim")),
    torch.argmin: Choice("argmin", Argument(1, "dim")),
    torch.Tensor.argmin: Choice("argmin", Argument(1, "dim")),
    torch.max: Choice("max", Argument(1, "dim")),
    torch.Tensor.max: Choice("max", Argument(1, "dim")),
    torch.min: Choice("min", Argument(1, "dim")),
    torch.Tensor.min: Choice("min", Argument(1, "dim")),
    torch.sort: Choice("sort", Argument(1, "dim", -1)),
    torch.Tensor.sort: Choice("sort", Argument(1, "dim", -1)),
    torch.argsort: Choice("argsort", Argument(1, "dim", -1)),
    torch.Tensor.argsort: Choice("argsort", Argument(1, "dim", -1)),
}
SEEN: Final = frozenset((*DROPOUTS, *RECURRENT, *BERNOULLI, *CHOICES))


def recurrent(args: tuple[Any, ...]) -> Dropout | None:
    """Of `lstm(input, hx, weights, biases, layers, dropout, train, …)`, or with `batch_sizes` after the input."""
    at = next((i for i, a in enumerate(args) if isinstance(a, bool)), None)
    if at is None or len(args) < at + 4:
        return None
    return Dropout("recurrent", Argument(at + 2, "dropout"), Argument(at + 3, "train"), elementwise=False)
