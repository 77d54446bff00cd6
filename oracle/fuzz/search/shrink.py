"""A failing scenario made small: fewer layers, narrower, fewer rows, one step, simpler values, as long as it fails in the same way.

It starts from the failure and walks to simpler points of the spaces, the boldest steps first. (hypothesis shrinks what its own strategies drew; a scenario out of a
file or of a cover would have to be found again first, which took 218 runs where this takes some forty.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from proctor.oracle.fuzz.axes import axis_of
from proctor.oracle.fuzz.models import template_of
from proctor.oracle.fuzz.space import compact, simpler
from proctor.oracle.fuzz.spec import INPUT, Scenario

MOST: Final = 150  # runs
PLAIN: Final = {"torch": "chain", "keras": "keras_chain"}  # the simplest template
MORE: Final = {"chain": "mlp", "keras_chain": "tanh"}  # a layer of it that is more than its first one

Fails = Callable[[Scenario], bool]


def shrunk(scenario: Scenario, fails: Fails, most: int = MOST) -> tuple[Scenario, int]:
    """The smallest scenario that was reached, and how many runs it took.

    Args:
        scenario: that fails.
        fails: whether another one fails in the same way.
        most: runs at most.
    """
    runs, tried = 0, {scenario.key()}
    again = True
    while again and runs < most:
        again = False
        for smaller in steps(scenario):
            if runs >= most:
                break
            if smaller.key() in tried:
                continue
            tried.add(smaller.key())
            runs += 1
            if fails(smaller):
                scenario, again = smaller, True
                break
    return scenario, runs


def steps(scenario: Scenario) -> Iterator[Scenario]:
    """Scenarios that are simpler in one place: another template, the model, the input, values of the setting."""
    plain = PLAIN.get(template_of(scenario.template).library, PLAIN["torch"])
    if scenario.template != plain:
        yield msgspec.structs.replace(scenario, template=plain, model={})
        yield msgspec.structs.replace(scenario, template=plain, model={"layers": [MORE[plain]]})
    for model in simpler(template_of(scenario.template).choices, scenario.model):
        yield msgspec.structs.replace(scenario, model=model)
    for given in simpler(INPUT, scenario.input):
        yield msgspec.structs.replace(scenario, input=given)
    if scenario.input.get("steps", 2) != 1:
        yield msgspec.structs.replace(scenario, input=compact(INPUT, {**scenario.input, "steps": 1}))
    for name, value in scenario.setting.items():
        axis = axis_of(name)
        if axis.sorts:
            continue  # another implementation may fail for another reason, a known one perhaps
        choice = axis.choice
        for other in choice.simpler(value):
            if other != choice.neutral:  # setting it back was tried when the trigger set was looked for
                yield scenario.with_setting({**scenario.setting, name: other})
