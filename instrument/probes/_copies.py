"""Objects of the program that hold a tensor for each parameter of a model: averages, target networks, teachers, shadows.

A module of the same class and shapes, be it a frozen part of the model itself (a key encoder), a mapping by the parameters' names, a list in their order. Found by one look at what the
garbage collector knows; nothing is kept alive, and nothing of the user's runs.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from proctor.instrument.observe import plainly
from proctor.instrument.observe.modules import class_name
from proctor.instrument.observe.plainly import lazy
from proctor.instrument.observe.refs import TensorRef
from proctor.invariants.codec.variable import unwrapped
from proctor.native import holders, living

MAX_COPIES: Final = 8
_MATRICES: Final = 4  # of a copy that are looked at: they are drawn at random,
_OTHERS: Final = 2  # where norms and biases begin alike
_LEAST: Final = 2  # elements, below which a tensor says too little
_MAX_PARAMETERS: Final = 4096
_ROOTS: Final = 64

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
Pair = tuple["weakref.ref[Any]", "weakref.ref[Any]"]  # tensor of the copy, tensor of the model


class Copy(NamedTuple):
    """A copy, and what it is a copy of."""

    label: str  # `module __main__.Net`, `mapping`, `list`
    pairs: tuple[Pair, ...]
    modules: tuple[weakref.ref[Any], weakref.ref[Any]] | None = None  # the copy and the model, where the copy is a module


def find(model: Any, held: set[int], objects: list[Any]) -> list[Copy]:
    """Copies of a model's trainable parameters.

    Args:
        model: a module that trains.
        held: ids of what an optimizer holds; a model that is trained itself is no copy.
        objects: `gc.get_objects()`, which a program with much data has for long.
    """
    import torch

    names = {unwrapped(n): p for n, p in plainly.named_parameters(model) if p.requires_grad}
    if not 0 < len(names) <= _MAX_PARAMETERS:
        return []
    own = {id(m) for m in plainly.modules(model)}
    by_shapes = _submodules(model)
    kinds = {kind for kind, _ in by_shapes}
    modules = [m for m in living(objects, torch.nn.Module) if type(m) in kinds and (id(m) not in own or not any(p.requires_grad for p in plainly.parameters(m)))]
    others = [o for o in holders(objects, len(names), next(iter(names)), _tensors(), OrderedDict) if len(o) == len(names) or names.keys() <= o.keys()]
    found: list[Copy] = []
    seen: set[int] = {id(p) for p in names.values()} | held
    for module in sorted(modules, key=lambda m: -sum(1 for _ in plainly.parameters(m))):
        source = by_shapes.get((type(module), _shapes(module)))
        if source is not None:
            pairs = list(zip(plainly.parameters(module), plainly.parameters(source)))
            # A part of the model runs in its forward: there is no evaluation of its own.
            both = None if id(module) in own else (weakref.ref(module), weakref.ref(source))
            _keep(found, seen, f"module {class_name(module)}", pairs, both)
    for thing in others:
        if type(thing) in (list, tuple):
            pairs = list(zip(thing, names.values()))
        else:
            plain = {unwrapped(k): v for k, v in thing.items() if isinstance(k, str)}
            pairs = [(plain[n], p) for n, p in names.items() if n in plain]
        if len(pairs) == len(names):
            _keep(found, seen, "list" if type(thing) in (list, tuple) else "mapping", pairs)
    return found[:MAX_COPIES]


def _keep(
    found: list[Copy], seen: set[int], label: str, pairs: list[tuple[Any, Any]], modules: tuple[weakref.ref[Any], weakref.ref[Any]] | None = None
) -> None:
    """Add a copy whose tensors are of their own and like the model's, unless they belong to one that was found before."""
    if any(id(c) in seen or not _alike(c, p) for c, p in pairs):
        return
    seen.update(id(c) for c, _ in pairs)
    told = [(c, p) for c, p in pairs if p.requires_grad and p.numel() >= _LEAST and p.device.type == "cpu" and p.is_floating_point()]
    matrices, others = [pair for pair in told if pair[0].dim() > 1], [pair for pair in told if pair[0].dim() <= 1]
    looked = _spread(matrices, _MATRICES + max(0, _OTHERS - len(others))) + _spread(others, _OTHERS + max(0, _MATRICES - len(matrices)))
    if told:
        found.append(Copy(label, tuple((TensorRef(c), TensorRef(p)) for c, p in looked), modules))


def _spread(pairs: list[tuple[Any, Any]], most: int) -> list[tuple[Any, Any]]:
    """At most so many of them, from all over."""
    return pairs[:: max(1, -(-len(pairs) // most))]


def _tensors() -> tuple[type, ...]:
    import torch

    return torch.Tensor, torch.nn.Parameter


def _alike(c: Any, p: Any) -> bool:
    return (
        type(c) in _tensors() and type(p) in _tensors()
        and c.shape == p.shape and c.device == p.device and c.is_floating_point() == p.is_floating_point()
        and (c.numel() == 0 or c.data_ptr() != p.data_ptr())
    )  # fmt: skip


def _submodules(model: Any) -> dict[tuple[type, Shapes], Any]:
    """The model and each of its modules that has parameters to train, by class and shapes, where no other is like it."""
    found: dict[tuple[type, Shapes], list[Any]] = {}
    for module in plainly.modules(model):
        if any(p.requires_grad for p in plainly.parameters(module)):
            found.setdefault((type(module), _shapes(module)), []).append(module)
    return {key: several[0] for key, several in found.items() if len(several) == 1}


def _shapes(module: Any) -> Shapes:
    return tuple((n, () if lazy(p) else tuple(p.shape)) for n, p in plainly.named_parameters(module))


def values(refs: Iterator[Any], elements: int) -> list[float] | None:
    """Some elements of each of these tensors; `None` where one is gone."""
    found: list[float] = []
    for ref in refs:
        tensor = ref()
        if tensor is None:
            return None
        found += elements_of(tensor, elements)
    return found


def elements_of(tensor: Any, count: int) -> list[float]:
    """Some elements of a tensor, spread over it."""
    flat = tensor.detach().reshape(-1)
    step = max(1, flat.numel() // count)
    told: list[float] = flat[::step][:count].tolist()
    return told


class Roots:
    """Which modules lie in which roots.

    Args:
        modules: a copy and its model.
    """

    def __init__(self, *modules: Any) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        self._known: dict[int, tuple[weakref.ref[Any], tuple[bool, ...]]] = {}

    def of(self, root: Any) -> tuple[bool, ...]:
        """For each module whether it lies in this root."""
        known = self._known.get(id(root))
        if known is None or known[0]() is not root:
            inside = {id(module) for module in plainly.modules(root)}
            if len(self._known) >= _ROOTS:
                return tuple(False for _ in self._modules)
            known = self._known[id(root)] = weakref.ref(root), tuple((m := ref()) is not None and id(m) in inside for ref in self._modules)
        return known[1]
