"""What a variable of a trace is: in a module of its own, so that the training process imports no dataframe library."""

from __future__ import annotations

import re
from typing import Final

import msgspec

_PRIVATE: Final = re.compile(r"_\w*mod(?:ule|el)?")  # _orig_mod, _fsdp_wrapped_module, _forward_module, …


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


def apart(model: str, name: str) -> str:
    """The name of a tensor of a model, told from that of the same name in another model of the class: `Net#2.fc.weight`.

    The first of a class has none before it, so that programs with one model have plain names.
    """
    label, _, number = model.rpartition("#")
    return f"{label.rpartition('.')[2]}#{number}.{name}" if label and name else name


def is_wrapper_slot(name: str) -> bool:
    """Whether a wrapper may hold what it wraps under this name: `module`, or a private name for a module (`_orig_mod`, …)."""
    return name == "module" or _PRIVATE.fullmatch(name) is not None


def unwrapped(name: str) -> str:
    """A key of a state dict without what wrappers put into it; any text will do."""
    return ".".join(part for part in name.split(".") if not is_wrapper_slot(part))
