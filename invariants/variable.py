"""What a variable of a trace is: in a module of its own, so that the training process imports no dataframe library."""

from __future__ import annotations

import msgspec


class Variable(msgspec.Struct, frozen=True):
    """What is tracked: one attribute of one named tensor of a model. Nothing in it depends on the rank."""

    model: str  # class of the root module
    name: str  # `root.named_parameters()` name
    attr: str  # data, grad, or an optimizer state key such as exp_avg
    role: str  # parameter, buffer, optimizer
    module: str = ""  # class of the module that owns it
    kind: str = ""  # last part of the name: weight, bias, running_mean
    position: str = ""  # first, middle, last: order of parameterised modules in the root
    alias: str = ""  # another name of the same tensor object, when it has several
