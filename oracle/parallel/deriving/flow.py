"""Which layers feed which, from one forward: what a plan needs that only says how parameters are cut, and what a plan is made of where nothing is said.

Outputs of a layer are followed through all operations of the forward. A linear layer that takes what no other feeds can have its outputs cut; one
that takes what such layers feed has its inputs cut, and there the trace ends, as its addends are summed. A trace that arrives at the model's
output, or at a layer that stays whole, must be put together again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from proctor.oracle.parallel.deriving.rehearsal import Batch, slots
from proctor.oracle.parallel.verify import LINEAR, TABLE

# Operations that look at all elements of the last dimension, where it is that of the layer's outputs.
_ALONG: Final = frozenset({
    "_softmax", "_log_softmax", "topk", "sort", "argmax", "argmin", "max", "min", "amax", "amin", "mean", "sum", "var", "var_mean", "std", "logsumexp",
    "native_layer_norm", "cumsum", "norm", "linalg_vector_norm", "native_group_norm",
})  # fmt: skip
# Operations that put elements of the same place together.
_TOGETHER: Final = frozenset({"add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "addcmul", "where", "lerp"})
_PIECES: Final = frozenset({"split", "split_with_sizes", "chunk", "slice", "unbind", "select"})


class Layer(NamedTuple):
    """A layer that can be cut.

    Args:
        kind: "linear" or "table".
        out: outputs.
        transposed: whether the weight is [inputs, outputs].
        bias: whether it has one.
    """

    kind: str
    out: int
    transposed: bool
    bias: bool


class Flow:
    """What was found.

    Args:
        layers: by path, in the order of the first call.
        feeds: layers whose outputs a layer takes, by its path, in the order of calls; nothing for one that takes none.
        whole: layers that something needs whole.
        leaves: layers whose outputs arrive at the model's output.
        waiting: parameters of other modules that see a part of the outputs (a norm of each head).
        pieces: layers whose outputs are taken apart, with the number of equal pieces; 0 where they are not equal.
        sizes: of unequal pieces.
    """

    def __init__(self, layers: dict[str, Layer]) -> None:
        self.layers = layers
        self.feeds: dict[str, frozenset[str]] = {}
        self.whole: set[str] = set()
        self.leaves: set[str] = set()
        self.waiting: dict[str, frozenset[str]] = {}
        self.pieces: dict[str, int] = {}
        self.sizes: dict[str, tuple[int, ...]] = {}


def layers_of(model: torch.nn.Module) -> dict[str, Layer]:
    """Linear layers and embeddings, by path; those that a subclass computes in its own way too, since it is tried."""
    found = {}
    for path, module in model.named_modules():
        weight = module._parameters.get("weight")
        kind = next((c.__name__ for c in type(module).__mro__ if c.__name__ in LINEAR or c.__name__ in TABLE), "")
        if kind and path and weight is not None and weight.dim() == 2:
            along = LINEAR.get(kind, 1)
            found[path] = Layer("table" if kind in TABLE else "linear", weight.shape[along], kind in LINEAR and along == 1, module._parameters.get("bias") is not None)
    return found


def follow(model: torch.nn.Module, batch: Batch, whole: Iterable[str] = ()) -> Flow:
    """One forward on one device, without gradients.

    Args:
        model: in evaluation.
        batch: what it is called with.
        whole: layers that stay whole, whose outputs are not followed.
    """
    layers = layers_of(model)
    flow = Flow(layers)
    modules = dict(model.named_modules())
    linear = {path: modules[path] for path, layer in layers.items() if layer.kind == "linear"}
    constants = {_place(b): frozenset[str]() for b in model.buffers() if _place(b)}
    tracer = _Tracer(flow, frozenset(whole), constants | {_place(p): frozenset({name}) for name, p in model.named_parameters() if _place(p)})
    handles = []
    for path, module in linear.items():
        handles.append(module.register_forward_pre_hook(lambda m, args, kwargs, p=path: tracer.enter(p, (args, kwargs)), with_kwargs=True))
        handles.append(module.register_forward_hook(lambda m, args, out, p=path: tracer.leave(p, out)))
    try:
        with torch.no_grad(), tracer:
            output = model(*batch.args, **batch.kwargs)
    finally:
        for handle in handles:
            handle.remove()
    for tensor in slots(output).values():
        flow.leaves |= tracer.traces(tensor)
    return flow


def _place(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory; 0 where it has none of its own (a sparse one), which is not followed."""
    return int(tensor.untyped_storage().data_ptr()) if tensor.layout == torch.strided else 0


class _Tracer(TorchDispatchMode):  # type: ignore[misc]  # torch is not typed here
    """Which layers' outputs are in a tensor's memory. Memory is kept, so that no address comes twice."""

    def __init__(self, flow: Flow, whole: frozenset[str], constants: dict[int, frozenset[str]]) -> None:
        super().__init__()
        self.flow, self._whole = flow, whole
        self._traces: dict[int, frozenset[str]] = {}
        self._of = constants  # parameters in what is made of parameters and constants alone
        self._kept: list[Any] = []
        self._inside: list[str] = []

    def traces(self, tensor: torch.Tensor) -> frozenset[str]:
        return self._traces.get(_place(tensor), frozenset())

    def enter(self, path: str, given: Any) -> None:
        taken = frozenset[str]().union(*(self.traces(t) for t in slots(given).values()))
        self.flow.feeds[path] = self.flow.feeds.get(path, frozenset()) | taken
        self._inside.append(path)

    def leave(self, path: str, output: Any) -> None:
        self._inside.pop()
        mark = frozenset() if self.flow.feeds[path] or path in self._whole else frozenset({path})
        for tensor in slots(output).values():
            self._keep(tensor, mark)

    def _keep(self, tensor: torch.Tensor, traces: frozenset[str]) -> None:
        if _place(tensor):
            self._kept.append(tensor.untyped_storage())
            self._traces[_place(tensor)] = traces

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        given = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        made = [t for t in torch.utils._pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]
        traces = frozenset[str]().union(*(self.traces(t) for t in given))
        if traces and not self._inside:
            self._look(func.overloadpacket.__name__, args, given, traces)
        alone = bool(given) and not traces and all(_place(t) in self._of or t.numel() == 1 for t in given)
        for tensor in made:
            self._keep(tensor, traces | self.traces(tensor))
            if alone and _place(tensor):
                self._of.setdefault(_place(tensor), frozenset[str]().union(*(self._of.get(_place(t), ()) for t in given)))
        return output

    def _look(self, name: str, args: Any, given: list[torch.Tensor], traces: frozenset[str]) -> None:
        """What an operation says of the layers whose outputs it takes."""
        widths = {path: self.flow.layers[path].out for path in traces}
        followed = [t for t in given if self.traces(t) and t.dim()]
        for other in (t for t in given if _place(t) in self._of):
            # One number for each output is about all of them; one for each of a head, or for all, is about those that are there.
            if needs := {path for path, width in widths.items() if other.dim() and other.shape[-1] == width > 1}:
                self.flow.whole |= needs
            else:
                for parameter in self._of[_place(other)]:
                    self.flow.waiting[parameter] = self.flow.waiting.get(parameter, frozenset()) | traces
        if name in _TOGETHER:
            self._beside(given, followed)
        for tensor in followed:
            here = {path: w for path, w in widths.items() if path in self.traces(tensor) and w == tensor.shape[-1]}
            if name in _ALONG and not (name in ("mean", "sum", "amax", "amin", "var", "norm") and len(args) > 1 and not _last(args[1], tensor.dim())):
                self.flow.whole |= set(here)
            elif here and name in _PIECES and len(args) > 1:
                self._taken_apart(name, args, tensor, set(here))
            elif here and name in ("view", "_unsafe_view", "reshape") and len(args) > 1:
                self._viewed(list(args[1]), tensor, set(here))

    def _beside(self, given: list[torch.Tensor], followed: list[torch.Tensor]) -> None:
        """Outputs, or a piece of them, beside as many numbers that no layer made: those are whole, so the outputs are needed whole."""
        others = {t.shape[-1] for t in given if t.dim() and not self.traces(t) and _place(t) not in self._of}
        for tensor in followed:
            width = tensor.shape[-1]
            if width in others and width > 1:
                made = {path: self.flow.layers[path].out // max(self.flow.pieces.get(path, 1), 1) for path in self.traces(tensor)}
                self.flow.whole |= {path for path, own in made.items() if own == width}

    def _taken_apart(self, name: str, args: Any, tensor: torch.Tensor, paths: set[str]) -> None:
        dim = args[2] if name in ("split", "split_with_sizes", "chunk") and len(args) > 2 else args[1] if name in ("slice", "select") else 0
        if not isinstance(dim, int) or dim % tensor.dim() != tensor.dim() - 1:
            return
        width = tensor.shape[-1]
        for path in paths:
            if name == "split_with_sizes":
                sizes = tuple(int(n) for n in args[1])
                self.flow.pieces[path] = len(sizes) if len(set(sizes)) == 1 else 0
                self.flow.sizes[path] = sizes
            elif name in ("split", "chunk"):
                self.flow.pieces[path] = -(-width // int(args[1])) if name == "split" else int(args[1])
            elif name == "slice" and len(args) > 3 and isinstance(args[3], int):
                self._sliced(path, args[2] or 0, min(args[3], width), width)

    def _sliced(self, path: str, start: int, stop: int, width: int) -> None:
        """Equal pieces, as long as each slice is one."""
        size = stop - start
        if 0 < size < width and start % size == 0 and width % size == 0 and self.flow.pieces.get(path, width // size) == width // size:
            self.flow.pieces[path] = width // size

    def _viewed(self, shape: list[int], tensor: torch.Tensor, paths: set[str]) -> None:
        """The first of the dimensions that a view makes of the outputs, where it is a few (query, key and value)."""
        before = tensor.dim() - 1
        if len(shape) > before + 1 and 1 < shape[before] <= 4:
            for path in paths:
                self.flow.pieces.setdefault(path, shape[before])


def _last(dims: Any, ndim: int) -> bool:
    given = [dims] if isinstance(dims, int) else list(dims or range(ndim))
    return any(isinstance(d, int) and d % ndim == ndim - 1 for d in given)
