"""What models over sequences are trained on: how far targets lie behind their inputs, masks that say nothing, and references that are made with dropout.

Rows of `Value.KEPT`. `next`: the target of a cross entropy is the sequence that an embedding was given in the forward before it, `number` places later; `sight`, what attention over
as many places sees: `causal` where some hides all later ones, `ahead` where each sees one place more than it may, and no more, `open` where each sees later ones and hides the same from all places, else "". Attention is torch's, or a softmax of a square of scores. `mask`: a tensor
of whole numbers or truth values that a model is given beside a padded sequence of its shape, whose elements are all 0 or all 1. `noise`: a model is given the same
tensors with and without gradients, one after the other, and drops out both times. Only the first steps are looked at, and only tensors on the CPU: elsewhere it would wait for the
device. Cost: 0.1 ms a look.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from proctor.instrument.observe import plainly
from proctor.instrument.observe.content import array_of
from proctor.instrument.observe.plainly import is_tensor
from proctor.instrument.probes import NO_HOOKS, EarlyProbe, Home, Hooks, Sink, register
from proctor.instrument.probes._repeats import node_of
from proctor.instrument.probes.judged import OVER_CLASSES, readable, tensors
from proctor.invariants.schema import MODEL_CALL, Value

_EMBEDDING: Final = "torch.nn.functional.embedding"
_ATTENTION: Final = "torch.nn.functional.scaled_dot_product_attention"
_SOFTMAX: Final = frozenset({"torch.nn.functional.softmax", "torch.softmax", "torch.Tensor.softmax"})
_HIDDEN: Final = -1e3  # scores below are those of places that are not to be seen
_SEQUENCES: Final = 8  # of one forward
_LEAST: Final = 4  # places of a sequence
_FARTHEST: Final = 4
_TELLING: Final = 8  # elements
_NODES: Final = 64  # of a graph
_PRODUCTS: Final = ("BmmBackward", "MmBackward", "BaddbmmBackward", "MatmulBackward")
_MOVES: Final = ("ConstantPadNd", "SliceBackward", "CatBackward", "IndexBackward", "GatherBackward", "AsStrided", "UnfoldBackward", "RollBackward")
_SAME, _OTHER = 0.8, 0.5  # shares of equal elements
Sequence = np.ndarray[Any, Any]


@register
class Sequences(EarlyProbe):
    """What a forward and the loss behind it were given."""

    name = "sequences"
    kinds = frozenset({Value.KEPT})
    looks = 128

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._ids: list[Sequence] = []
        self._places: set[int] = set()  # where in memory they lie
        self._masks: dict[str, tuple[Sequence, int]] = {}  # with their places
        self._sights: dict[int, set[str]] = {}  # by number of places: what attention over them sees
        self._given: dict[tuple[int, bool], tuple[int, ...]] = {}  # by model and whether gradients were made: what it was given

    def hooks(self, function: str, home: Home) -> Hooks:
        if function == MODEL_CALL:
            return self._begins, None
        if function in OVER_CLASSES:
            return self._loss, None
        if function in _SOFTMAX:
            return self._weighs, None
        return {_EMBEDDING: (self._embeds, None), _ATTENTION: (self._attends, None)}.get(function, NO_HOOKS)

    def step_begins(self, step: int) -> None:
        super().step_begins(step)
        if self.left <= 0:
            self._given, self._ids, self._places, self._masks = {}, [], set(), {}

    def _begins(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        root = args[0]
        if self.left <= 0 or not getattr(root, "training", False) or next(plainly.parameters(root), None) is None:
            return
        self.left -= 1
        self._ids, self._places, self._sights = [], set(), {}
        named = {f"argument {i}": value for i, value in enumerate(args[1:], 1)} | (kwargs or {})
        self._masks = {name: (array_of(value), value.data_ptr()) for name, value in named.items() if _sequence(value)}
        self._repeated(root, [tensor for value in named.values() for tensor in tensors(value)])

    def _repeated(self, root: Any, given: list[Any]) -> None:
        """Say whether this model is given what it was last given with gradients, or without, and drops out."""
        import torch

        from proctor.instrument.observe.fingerprint import fingerprint_all

        if not given:
            return
        prints = tuple(summary.fp for summary in fingerprint_all([tensor.detach() for tensor in given]))
        grads = torch.is_grad_enabled()
        self._given[id(root), grads] = prints
        if self._given.get((id(root), not grads)) != prints:
            return
        noisy = next(((path, type(m).__name__) for path, m in plainly.named_modules(root) if isinstance(m, torch.nn.modules.dropout._DropoutNd) and m.training and m.p > 0), None)
        kind = type(root).__name__
        seen = "" if noisy is None else f"{kind} is given one batch with gradients and without, and {noisy[1]} {noisy[0]} drops out without them, too"
        self.sink.number(kind if noisy is None else noisy[0], 1.0, kind=Value.KEPT, facts={"what": "noise", "seen": seen})

    def _embeds(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        value: Any = args[0] if args else (kwargs or {}).get("input")
        if self.left > 0 and len(self._ids) < _SEQUENCES and _sequence(value):
            self._ids.append(array_of(value))
            self._places.add(value.data_ptr())

    def _attends(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        if self.left <= 0:
            return
        told = kwargs or {}
        query: Any = args[0] if args else told.get("query")
        key: Any = args[1] if len(args) > 1 else told.get("key")
        mask = args[3] if len(args) > 3 else told.get("attn_mask")
        if not is_tensor(query) or not is_tensor(key) or query.dim() < 2 or key.dim() < 2:
            return
        places = int(query.shape[-2])
        if told.get("is_causal") or (len(args) > 5 and args[5]):
            self._note(places, "causal")
        elif int(key.shape[-2]) == places:
            self._note(places, "open" if mask is None else _sight(mask))

    def _weighs(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """Attention that is written out: a softmax of the scores of all places by all places."""
        scores: Any = args[0] if args else (kwargs or {}).get("input")
        dim = args[1] if len(args) > 1 else (kwargs or {}).get("dim")
        if self.left > 0 and readable(scores) and scores.dim() >= 3 and scores.shape[-1] == scores.shape[-2] and dim in (-1, scores.dim() - 1):
            sight = _sight(scores)
            self._note(int(scores.shape[-1]), "" if sight == "open" and _shifted(scores) else sight)

    def _seen_by(self, places: int) -> str:
        """What attention over so many places sees, of all layers: `causal` if some hides later ones, else what all see."""
        seen = self._sights.get(places, {""})
        return "causal" if "causal" in seen else next(iter(seen)) if len(seen) == 1 else ""

    def _note(self, places: int, sight: str) -> None:
        if places >= _LEAST:
            self._sights.setdefault(places, set()).add(sight)

    def _loss(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        scores = args[0] if args else (kwargs or {}).get("input")
        target: Any = args[1] if len(args) > 1 else (kwargs or {}).get("target")
        if self.left <= 0 or not self._ids or not getattr(scores, "requires_grad", False) or not readable(target) or target.is_floating_point():
            return
        flat = array_of(target).reshape(-1)
        found = {(told[0], self._seen_by(told[1])) for ids in self._ids if (told := ahead(ids, flat)) is not None}
        for k, sight in sorted(found):  # attention over more places than these has others before them: image features, a prompt
            self.sink.number("target", float(k), kind=Value.KEPT, facts={"what": "next", "seen": "", "sight": sight})
        for name, (mask, place) in self._masks.items():
            # What is embedded, or a target, is no mask.
            beside = [ids for ids in self._ids if ids.shape == mask.shape]
            if not beside or place in self._places or _equal(mask, flat) or not any(padded(ids) for ids in beside):
                continue
            values = np.unique(mask)
            idle = len(values) == 1 and int(values[0]) in (0, 1)
            seen = f"{name} of the model is {int(values[0])} in every element, and its sequences are padded to one length" if idle else ""
            self.sink.number(name, 1.0, kind=Value.KEPT, facts={"what": "mask", "seen": seen})
        self._masks = {}


def _sequence(value: Any) -> bool:
    """Whether this is a batch of sequences of whole numbers or truth values."""
    return readable(value) and value.dim() == 2 and not value.is_floating_point() and min(value.shape) >= 2 and max(value.shape) >= _LEAST


def _equal(a: Sequence, b: Sequence) -> bool:
    return a.size == b.size and bool((a.reshape(-1) == b.reshape(-1)).all())


def _sight(scores: Any) -> str:
    """What places see by a mask or by scores of which the last two dimensions are equal: told by three rows of the first square. See the module."""
    if not readable(scores) or scores.dim() < 2 or scores.shape[-1] != scores.shape[-2] or scores.shape[-1] < _LEAST:
        return ""
    square = scores.detach()[(0,) * (scores.dim() - 2)]
    n = square.shape[0]
    looked = square[[0, n // 2, n - 1]]
    hidden = array_of(looked.float() < _HIDDEN if looked.is_floating_point() else looked == 0)
    for name, more in (("causal", 1), ("ahead", 2)):
        if bool(hidden[0, more:].all() and hidden[1, n // 2 + more :].all()) and not bool(hidden[0, :more].any() or hidden[1, n // 2 : n // 2 + more].any()):
            return name
    return "open" if bool((hidden == hidden[0]).all()) and not bool(hidden[0, 1:].all()) else ""


def _shifted(scores: Any) -> bool:
    """Whether a product of matrices on which these scores depend had its places moved before it became them, by what autograd knows of them.

    Relative attention computes products with more keys than places, and moves each row by its own number: a column of the square is a distance then, and hides no place.
    """
    left: list[tuple[Any, bool]] = [(node_of(scores), False)]
    for _ in range(_NODES):
        if not left:
            return False
        node, moved = left.pop()
        name = "" if node is None else node.name()
        if name.startswith(_PRODUCTS):
            if moved:
                return True
        elif node is not None:
            left.extend((before, moved or name.startswith(_MOVES)) for before, _ in node.next_functions)
    return False


def ahead(ids: Sequence, target: Sequence) -> tuple[int, int] | None:
    """How many places behind the input a target lies, in either order of samples and time, and how many places the input has.

    `None` where it is not that sequence, or nothing tells.
    """
    found = [(k, turned.shape[1]) for turned in (ids, ids.T) if (k := _ahead(turned, target, transposed=turned is not ids)) is not None]
    return found[0] if len({k for k, _ in found}) == 1 else None  # a whole sequence fits both ways: rows are samples, then


def _ahead(ids: Sequence, target: Sequence, *, transposed: bool) -> int | None:
    rows, places = ids.shape
    if target.size % rows or places < _LEAST:
        return None
    lines = target.reshape(-1, rows).T if transposed else target.reshape(rows, -1)
    # Where a sequence stays at one number, as in its padding, any shift fits.
    new = np.ones(ids.shape, dtype=bool)
    new[:, 1:] = ids[:, 1:] != ids[:, :-1]
    scores = {}
    for k in range(_FARTHEST + 1):
        n = min(lines.shape[1], places - k)
        if n < 2:
            continue
        told = new[:, k : k + n] & (lines[:, :n] >= 0)
        if int(told.sum()) >= _TELLING:
            scores[k] = float((ids[:, k : k + n] == lines[:, :n])[told].mean())
    best = max(scores, key=lambda k: scores[k], default=None)
    if best is None or scores[best] < _SAME or any(score > _OTHER for k, score in scores.items() if k != best):
        return None
    return best


def padded(ids: Sequence) -> bool:
    """Whether rows end, or begin, in runs of one number that are not of one length."""
    return any(_ends_in_padding(side) for side in (ids, ids[:, ::-1]))


def _ends_in_padding(ids: Sequence) -> bool:
    runs = [int(np.argmax(np.append(row[::-1] != row[-1], True))) for row in ids]
    ends = [int(row[-1]) for row, run in zip(ids, runs, strict=True) if run >= 2]
    return len(ends) >= 2 and len(set(ends)) == 1 and len({run for run in runs if run >= 2}) >= 2
