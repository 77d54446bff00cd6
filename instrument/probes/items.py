"""Whether a list of like layers is gone through, or one of them is taken in the place of all.

A row of `Value.KEPT`, `items`, once for a list: of three or more modules of one class and shapes (`ModuleList`), a backward's graph goes through the parameters of one as often as the list is long, or a multiple
of that, and through none of the others, in each of three backwards. So a loop over the layers calls the same one each time (`norms[0](x)` for `norms[i](x)`). An expert, a head or a resolution that is chosen is
called once a pass, and one layer that is shared on purpose is in no list. What is compiled or recomputed (a checkpoint) hides its graph, and says nothing.
Cost: of `graphs.py`, once more.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any, Final

from proctor.instrument.observe import plainly
from proctor.instrument.observe.modules import class_name
from proctor.instrument.observe.plainly import lazy
from proctor.instrument.probes import Home, Hooks, Sink, register
from proctor.instrument.probes.graphs import OfLosses, nodes
from proctor.invariants.schema import MODEL_CALL, Value

_LEAST: Final = 3  # items
_LOOKS: Final = 3  # that say the same
_LISTS: Final = 64
_MODELS: Final = 16


@register
class Items(OfLosses):
    """Items of lists that nothing goes through."""

    name = "items"
    kinds = frozenset({Value.KEPT})

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._models: set[int] = set()
        self._lists: dict[int, tuple[weakref.ref[Any], str]] = {}  # and what they are called
        self._alone: dict[int, list[tuple[int, int]]] = {}  # by list: the one item that was gone through in each look, and how often

    def hooks(self, function: str, home: Home) -> Hooks:
        return (self._called, None) if function == MODEL_CALL else super().hooks(function, home)

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        model = args[0]
        if self.over or id(model) in self._models or len(self._models) >= _MODELS or not model.training:
            return
        from torch.nn import ModuleList

        self._models.add(id(model))
        for name, module in plainly.named_modules(model):
            if issubclass(type(module), ModuleList) and len(self._lists) < _LISTS and _like(list(module._modules.values())):
                self._lists.setdefault(id(module), (weakref.ref(module), name))

    def look(self, roots: list[Any], nth: int) -> None:
        every = nodes(roots) if self._lists else None
        if every is None:
            return
        uses = Counter(id(variable) for node in every for following, _ in node.next_functions if (variable := getattr(following, "variable", None)) is not None)
        for key, (ref, name) in list(self._lists.items()):
            module = ref()
            found = _alone(list(module._modules.values()), uses) if module is not None else None
            if found is None:
                del self._lists[key]
            elif found[1]:
                seen = self._alone.setdefault(key, [])
                seen.append(found)
                if len(seen) == _LOOKS:
                    del self._lists[key]
                    if len({item for item, _ in seen}) == 1:
                        self._tell(module, name, *found)

    def _tell(self, module: Any, name: str, item: int, times: int) -> None:
        count = len(module._modules)
        kind = class_name(module._modules[str(item)]).rpartition(".")[2]
        seen = f"{name}.{item} ({kind}) is gone through {times} times in a pass and none of the {count - 1} others of {name} is: one item stands in the place of all"
        self.sink.number(name, float(item), kind=Value.KEPT, facts={"what": "items", "seen": seen})


def _like(items: list[Any]) -> bool:
    """Whether these are three or more, of one class, with parameters of the same shapes."""
    if len(items) < _LEAST or None in items or len({type(item) for item in items}) > 1:
        return False
    shapes = {tuple(() if lazy(p) else tuple(p.shape) for p in plainly.parameters(item)) for item in items}
    return len(shapes) == 1 and shapes != {()} and len({id(p) for item in items for p in plainly.parameters(item)}) == len(items) * len(next(iter(shapes)))


def _alone(items: list[Any], uses: Counter[int]) -> tuple[int, int] | None:
    """The one item that is gone through, and how often: 0 times where none is; `None` where the list is gone through in another way."""
    if not all(p.requires_grad for item in items for p in plainly.parameters(item)):  # graphs do not go through what is frozen
        return None
    times = [max((uses[id(p)] for p in plainly.parameters(item)), default=0) for item in items]
    used = [i for i, count in enumerate(times) if count]
    if not used:
        return 0, 0
    one = used[0]
    return (one, times[one]) if len(used) == 1 and times[one] % len(items) == 0 else None
