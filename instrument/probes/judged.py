"""What loss functions are given: whether the targets lie as they came, and whether the scores are what the loss wants.

`Value.HANDED`: each tensor that a loader gives, or that a model which trains is given; `Value.JUDGED`: the target of a loss of torch, and what its scores
are (`probabilities`, `log-probabilities`, `scores`). Beside the fingerprint, which knows the order, `number` is a sum over the rows (item 0), or over the
elements of one line (item 1), which does not; item 2 is the transposed tensor. A target in one line whose samples came as rows is taken row by row: a sequence that
is turned round is no other order of samples. Only the first steps are looked at, and only tensors on the CPU: elsewhere it would wait
for the device. Cost: 0.1 to 3 ms a look, for four steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from proctor.instrument.observe import content, plainly
from proctor.instrument.observe.content import array_of
from proctor.instrument.observe.plainly import inside
from proctor.instrument.probes import NO_HOOKS, EarlyProbe, Home, Hooks, Sink, register
from proctor.instrument.probes.source.formulas import is_loss_of_torch
from proctor.invariants.schema import MODEL_CALL, Value

_NEXT: Final = "torch.utils.data.DataLoader.__next__"
OVER_CLASSES: Final = frozenset({"torch.nn.functional.cross_entropy", "torch.nn.functional.nll_loss"})  # losses
_TENSORS: Final = 6
_LARGEST: Final = 1 << 17  # elements
_SAMPLES: Final = 8  # whose scores are looked at
_WHOLE: Final = 1e-4  # by which probabilities miss 1, in float32
_EXACT: Final = float(1 << 53)


@register
class Judged(EarlyProbe):
    """Rows of `Value.HANDED` and `Value.JUDGED`."""

    name = "judged"
    kinds = frozenset({Value.HANDED, Value.JUDGED})
    looks = 256

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._places: dict[int, int] = {}  # of labels that came as rows: places of a row, by the number of elements

    def hooks(self, function: str, home: Home) -> Hooks:
        if function == _NEXT:
            return None, self._loaded
        if function == MODEL_CALL:
            return self._called, None
        if home is Home.TORCH and is_loss_of_torch(function):
            return (lambda args, kwargs: self._lost(function, args, kwargs or {})), None
        return NO_HOOKS

    def _loaded(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        if self.left > 0 and not raised:
            self._handed("loader", result)

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        # Where a model's forward is called by its name, a loss that is a module is called by nobody else: it is no model.
        if self.left > 0 and getattr(args[0], "training", False) and next(plainly.parameters(args[0]), None) is not None:
            self._handed("model", [*args[1:], *(kwargs or {}).values()])

    def _handed(self, place: str, value: Any) -> None:
        self.left -= 1
        for i, tensor in enumerate(tensors(value)):
            if i >= _TENSORS:
                return
            if tensor.dim() == 2 and tensor.shape[1] > 1 and not tensor.is_floating_point():
                self._places[tensor.numel()] = tensor.shape[1]
            for item, seen in looks(tensor):
                self._look(Value.HANDED, f"{place} {i}", item, seen, tensor if item < 2 else tensor.t().contiguous())

    def _lost(self, function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.left <= 0:
            return
        self.left -= 1
        scores: Any = args[0] if args else kwargs.get("input")
        target: Any = args[1] if len(args) > 1 else kwargs.get("target")
        if readable(target):
            places = self._places.get(target.numel(), 0) if target.dim() == 1 and not target.is_floating_point() else 0
            item, seen = next(iter(looks(target.detach().reshape(-1, places) if places else target)))
            self._look(Value.JUDGED, "target", item, seen, target)
        if function in OVER_CLASSES and readable(scores) and scores.dim() >= 2 and scores.shape[1] > 1:
            self.sink.number("scores", float(scores.shape[1]), kind=Value.JUDGED, facts={"scores": kind_of(scores.detach()[:_SAMPLES])})

    def _look(self, kind: Value, place: str, item: int, order_free: float, tensor: Any) -> None:
        from proctor.instrument.observe.fingerprint import fingerprint_all

        facts = {"dtype": str(tensor.dtype).removeprefix("torch.")}
        self.sink.measured(kind, place, facts, fingerprint_all([tensor.detach()])[0], order_free, item=item, call=self.sink.call)


def tensors(value: Any, depth: int = 3) -> Iterator[Any]:
    """The tensors of a batch that can be read."""
    if readable(value):
        yield value
    elif depth:
        for inner in (inside(value) or ())[:16]:
            yield from tensors(inner, depth - 1)


def readable(value: Any) -> bool:
    """A plain tensor of several rows on the CPU, not too large, whose memory is there."""
    return content.plain(value, _LARGEST) and value.dim() > 0 and value.shape[0] > 1 and not value.is_complex()


def looks(tensor: Any) -> Iterator[tuple[int, float]]:
    """What a tensor holds in any order of its rows (0), or of its elements where it is one line (1); and labels of two dimensions also transposed (2)."""
    rows = bits(tensor).reshape(tensor.shape[0], -1)
    yield (1 if rows.shape[1] == 1 else 0), unordered(rows)
    if tensor.dim() == 2 and rows.shape[1] > 1 and not tensor.is_floating_point():  # of labels, which losses are given in one line
        yield 2, unordered(np.ascontiguousarray(rows.T))


def bits(tensor: Any) -> np.ndarray[Any, Any]:
    """A tensor's elements as unsigned numbers."""
    import torch

    data = tensor.detach().contiguous()
    size = data.element_size()
    plain = data.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
    return array_of(plain).astype(np.int64).view(np.uint64)


def unordered(rows: np.ndarray[Any, Any]) -> float:
    """A sum over rows that no order of theirs changes, below 2**53."""
    with np.errstate(over="ignore"):
        keys = (np.arange(1, rows.shape[1] + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) | np.uint64(1)
        mixed = ((rows + keys) * keys).sum(axis=1, dtype=np.uint64)
        mixed ^= mixed >> np.uint64(31)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(29)
        return float(int(mixed.sum(dtype=np.uint64)) % int(_EXACT))


def kind_of(scores: Any) -> str:
    """What some scores (samples, classes, …) are, told from their sums over the classes."""
    import torch

    with torch.no_grad():
        values = scores.float()
        if bool((values >= 0).all()) and bool(((values.sum(1) - 1).abs() < _WHOLE).all()):
            return "probabilities"
        return "log-probabilities" if bool((values.logsumexp(1).abs() < 10 * _WHOLE).all()) else "scores"
