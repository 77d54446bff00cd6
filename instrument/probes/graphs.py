"""What a loss is made of: the operations between it and the parameters.

A row of `Value.MANNER` for each of the first backwards of a step, in the first steps: `has` are the kinds of nodes of its graph. Left out are those that move
elements without changing them, multiplications of matrices and attention, which torch writes in one way or another as sizes demand, and what a compiled function hides.

Cost: 1 µs a node, at most 20,000 of them, of eight backwards.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Final

from proctor.instrument.probes import NO_HOOKS, EarlyProbe, Home, Hooks, Sink, register
from proctor.invariants.schema import Value

BACKWARD: Final = "torch.autograd.backward"  # which `Tensor.backward` calls, too
_NODES: Final = 20_000
_OF_STEP: Final = 4  # backwards of one step that are told apart
_LAYOUT: Final = frozenset(
    """View UnsafeView Reshape ReshapeAlias Clone Expand Transpose T Permute Slice Select AsStrided Squeeze Unsqueeze ToCopy Copy CopySlices Split SplitWithSizes
    Unbind Unsafe UnsafeSplit Alias Detach Narrow Contiguous Mm Addmm Bmm Baddbmm Addbmm Mv Addmv Dot Linear Matmul Repeat Undefined Diagonal MvBackward
    Movedim Swapaxes Flatten Unflatten Chunk Cat Stack Conj NestedTensor AccumulateGrad Graph Root Error NotImplemented""".split()
)


class OfLosses(EarlyProbe):
    """A probe that looks at the graphs of losses: of the first backwards of a step, in the first steps."""

    looks = 8

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._nth = 0

    def hooks(self, function: str, home: Home) -> Hooks:
        return (self._backward, None) if function == BACKWARD else NO_HOOKS

    def step_begins(self, step: int) -> None:
        super().step_begins(step)
        self._nth = 0

    def _backward(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        if self.left <= 0:
            return
        nth, self._nth = self._nth, self._nth + 1
        roots = [node for t in losses(args, kwargs) if (node := getattr(t, "grad_fn", None)) is not None]
        if not roots or nth >= _OF_STEP:
            return
        self.left -= 1
        self.look(roots, nth)

    @abstractmethod
    def look(self, roots: list[Any], nth: int) -> None:
        """Look at the graph behind the nodes that a backward begins at, the `nth` of its step, from 0."""


@register
class Graphs(OfLosses):
    """Kinds of operations behind a loss."""

    name = "graphs"
    kinds = frozenset({Value.MANNER})

    def look(self, roots: list[Any], nth: int) -> None:
        found = kinds_of(roots)
        if found is not None:
            self.sink.number(f"backward {nth + 1} of a step", float(len(found)), kind=Value.MANNER, facts={"mode": "made", "has": "|".join(sorted(found))})


def losses(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> list[Any]:
    """What a backward pass begins at."""
    given: Any = args[0] if args else (kwargs or {}).get("tensors")
    return list(given) if isinstance(given, list | tuple) else [given]


def nodes(roots: list[Any]) -> list[Any] | None:
    """All nodes of a graph; `None` where it is too large."""
    found, seen = list(roots), set(roots)
    for node in found:
        if len(seen) > _NODES:
            return None
        fresh = [following for following, _ in node.next_functions if following is not None and following not in seen]
        found += dict.fromkeys(fresh)
        seen.update(fresh)
    return found


def kind_of(node: Any) -> str:
    """What a node of a graph undoes, such as `MulBackward`, without the number of its kind."""
    return str(node.name()).rpartition("::")[2].rstrip("0123456789")


def kinds_of(roots: list[Any]) -> set[str] | None:
    """Kinds of the nodes of a graph; `None` where it is too large, or has compiled parts."""
    found, every = set(), nodes(roots)
    if every is None:
        return None
    for node in every:
        kind = kind_of(node).removesuffix("Backward")
        if kind.startswith("CompiledFunction"):
            return None
        if kind not in _LAYOUT and not kind.startswith(("ScaledDotProduct", "Foreach", "Mkldnn")):
            found.add(kind)
    return found
