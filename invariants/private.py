"""Does a rule speak of what a library keeps to itself? Names that begin with an underscore change between two versions
and with options that the learned programs did not use, so what healthy programs do with them is no law.

What a user's own code calls `_so` is the user's: a rule learned from it is for that code.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Final

from proctor.invariants.condition import Precondition
from proctor.invariants.invariant import Hypothesis

_NAME: Final = re.compile(r"\w+(?:\.\w+)*")
_PRIVATE: Final = re.compile(r"(?:^|\.)_(?!_\w+__(?:\.|$))")  # __init__ and __main__ are no secrets
_OF: Final = "family"  # says of which programs a rule is: those whose models are all scripted are made of a private class of torch's
_OWNERS: Final = ("fn", "parent", "caller")  # parameters that say whose arguments and variables a rule is about


def libraries_of(versions: Mapping[str, Collection[str] | str]) -> frozenset[str]:
    """Names of the libraries among those that a run calls: what has a version. A folder of the user's has none."""
    return frozenset({"torch", *(name for name, known in versions.items() if known)})


def private_name(hypothesis: Hypothesis, precondition: Precondition, libraries: Collection[str]) -> str:
    """The first private name of a library in a rule; "" where it has none.

    Args:
        hypothesis: of the rule.
        precondition: of the rule.
        libraries: `libraries_of` what the rule was learned from.
    """
    owner = next((name.partition(".")[0] for key in _OWNERS if (name := hypothesis.text(key))), "")
    for name in _names(hypothesis, precondition):
        root = name.partition(".")[0]
        # Inside a function of a library, every name without an owner of its own is the library's.
        theirs = root in libraries or (owner in libraries and root != "__main__")
        if theirs and _PRIVATE.search(name):
            return name
    return ""


def _names(hypothesis: Hypothesis, precondition: Precondition) -> Iterator[str]:
    for key, value in hypothesis.params:
        if isinstance(value, str) and key != _OF:
            yield from _NAME.findall(value)
    for clause in precondition.any_of:
        for condition in clause:
            if condition.field == _OF:
                continue
            for text in (condition.field, condition.value or ""):
                yield from _NAME.findall(text)
