"""Whether one sample alone of what a recurrent layer gives for a batch is used.

A row of `Value.KEPT`, `sample`, of a loss whose graph has a recurrent layer of several samples, of whose results one entry along the dimension of samples is taken and nothing else: the last sample where the last place of each
was meant. That is so where a layer without `batch_first` is given samples first, which mixes them besides, and where one with `batch_first` is asked for its last row. A loop over samples takes all of them, and what
is taken of a batch of one is all that there is. Told when it is seen a second time. Cost: 1 µs a node, at most 20,000 of them, of eight backwards.
"""

from __future__ import annotations

from typing import Any, Final

from proctor.instrument.probes import Sink, register
from proctor.instrument.probes.graphs import OfLosses, kind_of, nodes
from proctor.invariants.schema import Value

_LAYERS: Final = frozenset({"MkldnnRnnLayerBackward", "CudnnRnnBackward", "MiopenRnnBackward"})
_AS_GIVEN: Final = frozenset({"CudnnRnnBackward", "MiopenRnnBackward"})  # whose results lie as those of the layer; places come first in the others
_LEAST: Final = 3  # places that a recurrence goes over
_TWICE: Final = 2
_FAR: Final = 512  # operations between two places of a recurrence


@register
class Samples(OfLosses):
    """Samples that are left out."""

    name = "samples"
    kinds = frozenset({Value.KEPT})

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._times = 0

    def look(self, roots: list[Any], nth: int) -> None:
        found = alone(roots)
        self._times += found is not None
        if found is not None and self._times == _TWICE:
            of, places = found
            seen = f"of what a recurrent layer gives for {of} samples and {places} places, one sample alone is used: the dimension of samples stands where that of places was meant"
            self.sink.number("loss", float(of), kind=Value.KEPT, facts={"what": "sample", "seen": seen})


def alone(roots: list[Any]) -> tuple[int, int] | None:
    """Of how many samples one is used, and how many places they have, of the first recurrent layer behind these nodes of which that is so."""
    every = nodes(roots) or []
    layers = [node for node in every if kind_of(node) in _LAYERS or kind_of(node) == "StackBackward"]
    if not layers:
        return None
    users: dict[Any, list[Any]] = {}
    for node in every:
        for given, nth in node.next_functions:
            if nth == 0 and given is not None:
                users.setdefault(given, []).append(node)
    for layer in layers:
        shape = _shape(layer)
        batch = first = int(not (kind_of(layer) in _AS_GIVEN and _saved(layer, "batch_first")))
        if len(shape) != 3 or shape[batch] < 2 or shape[1 - batch] < _LEAST:
            continue
        result = layer
        using = users.get(result, [])
        while len(using) == 1 and (turned := _turned(using[0], batch)) is not None:
            batch, result = turned, using[0]
            using = users.get(result, [])
        if len(using) == 1 and kind_of(using[0]) == "SelectBackward" and _saved(using[0], "dim") == batch and (kind_of(layer) in _LAYERS or _recurs(layer)):
            return shape[first], shape[1 - first]
    return None


def _turned(node: Any, batch: int) -> int | None:
    """Where samples lie behind a transposition; None of other operations."""
    if kind_of(node) != "TransposeBackward":
        return None
    dims = {_saved(node, "dim0"), _saved(node, "dim1")}
    return 1 - batch if dims == {0, 1} else None


def _recurs(stack: Any) -> bool:
    """Whether what is stacked are the places of a recurrence: the second is made of the first."""
    given = [following for following, _ in stack.next_functions]
    if _saved(stack, "dim") != 0 or len(given) < _LEAST or any(one is None for one in given):
        return False
    for before, after in ((given[0], given[1]), (given[1], given[0])):  # a layer may go backwards
        seen, behind = {after}, [after]
        for node in behind:
            if node is before:
                return True
            fresh = [following for following, _ in node.next_functions if following is not None and following not in seen]
            if len(seen) > _FAR:
                break
            seen.update(fresh)
            behind += dict.fromkeys(fresh)
    return False


def _shape(node: Any) -> tuple[int, ...]:
    known = getattr(node, "_input_metadata", ())
    return tuple(int(n) for n in known[0].shape) if known else ()


def _saved(node: Any, name: str) -> Any:
    return getattr(node, f"_saved_{name}", None)
