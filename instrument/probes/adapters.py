"""Whether adapters of peft take part in the training that they are made for, and are saved and loaded whole.

Rows of `Value.USAGE`, library `peft`, of the first updates, and of the first behind each call that makes, activates, merges or loads an adapter, or builds an optimizer, and of each eighth. Of the layers of the model whose forward the update follows, which carry
an adapter: `merged`: none was merged into its base, where its adapter gets no gradient. `enabled`: not all of them were switched off in each forward of the step. `held`: what of an active adapter is to train is in an optimizer.
`frozen`: not all of the active adapters are frozen where something else of the model trains. `base`: a weight under an adapter is in no optimizer to train. Of files, `saved`: what `save_pretrained` is asked to
write has all that trained, unless the rest is saved elsewhere before the next update; `loaded`: each tensor of a state belongs to something, and each of the adapter has one.

Where an optimizer holds copies of the parameters (masters, flat partitions), nothing is said: it holds none of the model's. Names that peft keeps to itself are not read.
Cost: a walk through the model for each of at most 64 updates.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Final

from proctor.instrument.observe import plainly
from proctor.instrument.observe.modules import class_name, unwrap
from proctor.instrument.observe.refs import TensorRef
from proctor.instrument.probes import NO_HOOKS, Home, Hooks, Sink, register
from proctor.instrument.probes._usage import MADE, UPDATE, Usage
from proctor.invariants.schema import MODEL_CALL

_SAVE: Final = "peft.PeftModel.save_pretrained"
_STATE: Final = "peft.get_peft_model_state_dict"
_LOAD: Final = "peft.set_peft_model_state_dict"
_CHANGES: Final = frozenset(
    {"peft.get_peft_model", *(f"peft.PeftModel.{m}" for m in ("load_adapter", "add_adapter", "set_adapter", "delete_adapter")), *(f"peft.BaseTuner.{m}" for m in ("merge_adapter", "unmerge_adapter", "merge_and_unload", "unload"))}
)
_KEEPS: Final = {"torch.save": 0, "safetensors.torch.save_file": 0, "safetensors.torch.save_model": 0}  # place of what is saved
_STATE_DICT: Final = "torch.nn.Module.state_dict"
_UPDATES: Final = 4  # behind a change, that are looked at,
_EACH: Final = 8  # and one in so many
_MOST: Final = 64
_FORWARDS: Final = 16  # of one step
_DEPTH: Final = 4


class _Look:
    """The layers with adapters of one model, as a forward that trains found them."""

    def __init__(self, model: Any, layers: list[Any]) -> None:
        self.model, self.layers = model, layers
        self.merged = sum(bool(layer.merged) for layer in layers)
        self.off = sum(bool(layer.disable_adapters) for layer in layers)


@register
class Adapters(Usage):
    """Adapters that train, and that are saved."""

    name = "adapters"
    library = "peft"

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._left, self._most = _UPDATES, _MOST
        self._updated = 0
        self._looks: list[_Look] = []  # since the last update
        self._collected: list[set[int | str]] = []  # what is written, of each `save_pretrained` that runs: where it lies, and how it is called
        self._listed_here = False  # whether the `save_pretrained` that runs has listed a state: one that was imported before anybody looked is not seen to
        self._listing = 0  # calls that list the state of an adapter, and ask the whole model for its own
        self._kept: set[int] = set()  # what was saved otherwise since the last update
        self._trained: dict[int, weakref.ref[Any]] = {}  # parameters that an optimizer held at an update
        self._unsaved: dict[int, str] = {}  # names of what trained and was not, by where it lies

    def hooks(self, function: str, home: Home) -> Hooks:
        if function in _CHANGES:
            return None, self._changed
        if function in _KEEPS:
            return (lambda args, kwargs: self._keeps(args)), None
        return {
            MADE: (None, self._built), MODEL_CALL: (self._called, None), UPDATE: (self._updates, None), _SAVE: (self._saves, self._saved), _STATE: (self._lists, self._listed),
            _LOAD: (None, self._loaded), _STATE_DICT: (None, self._asked),
        }.get(function, NO_HOOKS)  # fmt: skip

    def closing(self) -> None:
        self._settle(call=0)

    def _built(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        self.made(args, kwargs, result, raised)
        self._left = _UPDATES

    def _changed(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        self._left = _UPDATES

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        library = sys.modules.get("peft.tuners.tuners_utils")
        if library is None or self._most <= 0 or (self._left <= 0 and self._updated % _EACH) or len(self._looks) >= _FORWARDS:
            return
        import torch

        model = args[0]
        if torch.is_grad_enabled() and model.training:
            layers = [m for m in plainly.modules(model) if isinstance(m, library.BaseTunerLayer)]
            if layers:
                self._looks.append(_Look(unwrap(model)[0], layers))

    def _updates(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        self._settle()
        self._updated += 1
        looks, self._looks = self._looks, []
        if not looks:
            return
        held = {id(p) for p in self.held()}
        mine = {id(p) for group in args[0].param_groups for p in group["params"]}
        models: dict[int, list[_Look]] = {}
        self._trained |= {id(p): TensorRef(p) for group in args[0].param_groups for p in group["params"] if p.requires_grad}
        for look in looks:
            models.setdefault(id(look.model), []).append(look)
        for found in models.values():
            if any(id(p) in mine for p in plainly.parameters(found[0].model)):
                self._left, self._most = self._left - 1, self._most - 1
                self._judge(found, held)

    def _judge(self, looks: list[_Look], held: set[int]) -> None:
        """What the forwards of one model show, behind which an optimizer that holds something of it updates."""
        model, layers, name = looks[-1].model, looks[-1].layers, class_name(looks[-1].model).rpartition(".")[2]
        merged = min(look.merged for look in looks)
        self.say("merged", name, f"{'all' if merged == len(layers) else 'some'} adapters of {name} are merged into its base in the forward that trains" if merged else "")
        off = all(look.off == len(look.layers) for look in looks)
        self.say("enabled", name, f"all adapters of {name} are switched off in the forward that trains" if off else "")
        active = [p for layer in layers for p in _parts(layer)]
        wanted = [p for p in active if p.requires_grad]
        if wanted:
            missing = [p for p in wanted if id(p) not in held]
            share = "all" if len(missing) == len(wanted) else "some"
            self.say("held", name, f"{share} parameters of the active adapters of {name} ({_active(layers)}) are in no optimizer" if missing else "")
        if active:
            others = any(p.requires_grad and id(p) in held for p in plainly.parameters(model))
            if wanted or others:
                self.say("frozen", name, "" if wanted else f"the active adapters of {name} ({_active(layers)}) are frozen, and other parameters of it train")
        if wanted:
            weights = [w for layer in layers if (w := layer.get_base_layer()._parameters.get("weight")) is not None]  # one that is computed is not asked for
            trained = [w for w in weights if w.requires_grad and id(w) in held]
            self.say("base", name, f"{'all' if len(trained) == len(weights) else 'some'} weights of {name} under an adapter are trained, too" if trained else "")

    # -- files ------------------------------------------------------------------------------------------------------

    def _saves(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        self._collected.append(set())
        self._listed_here = False

    def _lists(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        self._listing += 1

    def _listed(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        self._listing -= 1
        found: set[int] = set() if raised else set(_places(result))
        self._listed_here = not raised
        if self._collected:
            self._collected[-1] |= found | (set(result) if isinstance(result, dict) else set())
        else:
            self._keep(found)

    def _saved(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        written = self._collected.pop() if self._collected else set()
        model, options = args[0], kwargs or {}
        given = options.get("state_dict") is not None or options.get("path_initial_model_for_weight_conversion") is not None
        if raised or given or not self._listed_here or any(getattr(config, "is_prompt_learning", True) for config in model.peft_config.values()):
            return
        name = class_name(model).rpartition(".")[2]
        if not written:
            self.say("saved", name, f"save_pretrained of {name} writes an adapter without a tensor")
            return
        named = options.get("selected_adapters") is not None or len(args) > 3
        adapters = {id(p) for p in self._adapters(model)} if named else set()
        mine = ((path, p) for path, p in plainly.named_parameters(model) if p.requires_grad and id(p) not in adapters and _place(p))
        trained = {_place(p): path for path, p in mine if (ref := self._trained.get(id(p))) is not None and ref() is p}
        missing = {place: path for place, path in trained.items() if place not in written and place not in self._kept and not written.intersection(_names(path, model.peft_config))}
        if trained and not missing:
            self.say("saved", name)
        self._unsaved |= missing

    def _adapters(self, model: Any) -> Iterator[Any]:
        """All parameters of layers with adapters, of whichever adapter, and of copies that are trained and saved in the place of a module."""
        kinds = (sys.modules["peft.tuners.tuners_utils"].BaseTunerLayer, sys.modules["peft.utils.other"].AuxiliaryTrainingWrapper)
        for module in plainly.modules(model):
            if isinstance(module, kinds):
                yield from plainly.parameters(module)

    def _keeps(self, args: tuple[Any, ...]) -> None:
        if not self._collected:
            self._keep(set(_places(args[0]) if args else ()))

    def _asked(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        if not self._collected and not self._listing and not raised and "peft" in sys.modules:
            self._keep(set(_places(result)))

    def _keep(self, places: set[int]) -> None:
        self._kept |= places
        self._unsaved = {place: path for place, path in self._unsaved.items() if place not in places}

    def _settle(self, call: int | None = None) -> None:
        """Until an update whatever an adapter's file lacks may be saved elsewhere."""
        if self._unsaved and not self.over:
            first = next(iter(self._unsaved.values()))
            self.say("saved", "PeftModel", f"save_pretrained leaves out {first} and what else trained, and nothing else saves it", call=call)
        self._unsaved = {}
        self._kept = set()

    def _loaded(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        self._left = _UPDATES
        unexpected = getattr(result, "unexpected_keys", None)
        if raised or unexpected is None or not args:
            return
        name = class_name(args[0]).rpartition(".")[2]
        adapter = (kwargs or {}).get("adapter_name", args[2] if len(args) > 2 else "default")
        kinds = {kind for module in plainly.modules(args[0]) for kind in getattr(type(module), "adapter_layer_names", ())}
        missing = [key for key in result.missing_keys if adapter in (parts := key.split(".")) and kinds.intersection(parts)]
        if unexpected:
            self.say("loaded", name, f"a state that is loaded into {name} has tensors that belong to nothing, such as {unexpected[0]}")
        else:
            self.say("loaded", name, f"a state that is loaded into {name} has nothing for {missing[0]}" if missing else "")


def _names(path: str, adapters: Iterable[str]) -> set[str]:
    """What a parameter is called in a file, which has no adapter's name: a method may save a part of it (AdaLoRA its ranks)."""
    parts = path.split(".")
    return {".".join(part for part in parts if part not in (adapter, "modules_to_save")) for adapter in adapters if adapter in parts}


def _active(layers: list[Any]) -> str:
    return ", ".join(sorted({name for layer in layers for name in layer.active_adapters}))


def _parts(layer: Any) -> Iterator[Any]:
    """Parameters of the active adapters of a layer."""
    for kind in layer.adapter_layer_names:
        table: Any = getattr(layer, kind, None)
        for adapter in layer.active_adapters:
            if not hasattr(table, "keys") or adapter not in table:
                continue
            part = table[adapter]
            yield from plainly.parameters(part) if hasattr(part, "parameters") else [part] if hasattr(part, "requires_grad") else []


def _places(value: Any, depth: int = _DEPTH) -> Iterator[int]:
    """Where the tensors of what is saved lie in memory."""
    import torch

    if isinstance(value, torch.Tensor):
        yield _place(value)
    elif isinstance(value, torch.nn.Module):
        yield from map(_place, plainly.parameters(value))
    elif depth and isinstance(value, dict):
        for inner in value.values():
            yield from _places(inner, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for inner in value:
            yield from _places(inner, depth - 1)


def _place(tensor: Any) -> int:
    """Where a plain tensor lies; 0 where it has no memory of its own."""
    import torch

    return int(tensor.data_ptr()) if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided else 0
