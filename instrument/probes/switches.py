"""Which switches of torch's own layers are on in the models that train.

Rows of `Value.MANNER`, mode `layers`, at the first training call of a model of each class: of each kind of place in it (numbers in names count as one: `blocks.*.norm`) that holds a layer of torch, in `has` words for what is so:
`batch_first is on`, `padding_idx is given`, `bias is left out`, `padding_mode is zeros`; in `lacks` those of what is not. Layers that share a place and disagree say nothing of it, nor is the mode of a module a switch, or where a result is written (`inplace`).
Sizes and shares are left to the program. Read off the objects' own dictionaries: nothing of the program runs. Cost: a walk over the modules, once a class.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from proctor.instrument.observe import plainly
from proctor.instrument.observe.modules import class_name
from proctor.instrument.observe.plainly import held
from proctor.instrument.probes import NO_HOOKS, Home, Hooks, Probe, Sink, register
from proctor.invariants.schema import MODEL_CALL, Value

_CLASSES: Final = 16
_LAYERS: Final = 4096
_PLACES: Final = 64  # of a class
_NO_SWITCH: Final = frozenset({"training", "inplace", "call_super_init", "dump_patches"})
_GIVEN: Final = frozenset({"padding_idx", "max_norm"})  # which are None where they are left out
_WORDS: Final = re.compile(r"[a-z_]{2,16}")  # a choice by its name: `bilinear`, `reflect`
_LAST_STEP: Final = 64


@register
class Switches(Probe):
    """Switches of layers."""

    name = "switches"
    kinds = frozenset({Value.MANNER})

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._known: set[type] = set()

    def hooks(self, function: str, home: Home) -> Hooks:
        return (self._called, None) if function == MODEL_CALL else NO_HOOKS

    def step_begins(self, step: int) -> None:
        self.over = self.over or step > _LAST_STEP

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        model = args[0]
        if self.over or type(model) in self._known or len(self._known) >= _CLASSES or held(model).get("training") is not True:
            return
        import torch

        if type(model).__module__.startswith("torch.") or not torch.is_grad_enabled():
            return
        self._known.add(type(model))
        places: dict[str, dict[str, set[str]]] = {}
        for nth, (name, module) in enumerate(_layers(model)):
            place = f"{re.sub(r'[0-9]+', '*', name)} ({type(module).__name__})"
            if nth >= _LAYERS or (place not in places and len(places) >= _PLACES):
                break
            for switch, word in _switches(module):
                places.setdefault(place, {}).setdefault(switch, set()).add(word)
        for place, switches in places.items():
            has = [f"{switch} is {next(iter(found))}" for switch, found in sorted(switches.items()) if len(found) == 1]
            lacks = [f"{switch} is {other}" for switch, found in sorted(switches.items()) if len(found) == 1 and (other := _OTHER.get(next(iter(found))))]
            self.sink.number(f"{class_name(model)}, {place}", float(len(has)), kind=Value.MANNER, facts={"mode": "layers", "has": "|".join(has), "lacks": "|".join(lacks)})


_OTHER: Final = {"on": "off", "off": "on", "given": "left out", "left out": "given"}


def _layers(model: Any) -> Iterator[tuple[str, Any]]:
    """Layers of torch's own classes in a model, with their names."""
    return ((name, module) for name, module in plainly.named_modules(model, remove_duplicate=False) if type(module).__module__.startswith("torch.nn.modules."))


def _switches(module: Any) -> Iterator[tuple[str, str]]:
    """Switches of a layer, and what they are."""
    for name, value in held(module).items():
        if name.startswith("_") or name in _NO_SWITCH:
            continue
        if type(value) is bool:
            yield name, "on" if value else "off"
        elif name in _GIVEN:
            yield name, "left out" if value is None else "given"
        elif type(value) is str and _WORDS.fullmatch(value):
            yield name, value
    parameters = held(module).get("_parameters")
    if type(parameters) is dict and "bias" in parameters:
        yield "bias", "left out" if parameters["bias"] is None else "given"
