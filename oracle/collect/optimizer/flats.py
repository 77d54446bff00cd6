"""An optimizer's own flat tensors, and the parameters whose elements they hold; `spans.py` tells where."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from proctor.oracle.collect.finding.models import Models
from proctor.oracle.collect.finding.roots import local_of
from proctor.oracle.collect.optimizer.spans import Gradients, Span, find_spans

_GRADS = ("main_grad", "grad")
_SHORT = (torch.bfloat16, torch.float16)


class Flats:
    """Tensors that optimizers update and that are no module's parameters.

    Args:
        models: have the parameters.
        notes: are told of tensors that are no parameter's.
    """

    def __init__(self, models: Models, notes: list[str]) -> None:
        self._models = models
        self._tensors: dict[int, Any] = {}
        self._spans: dict[int, list[Span]] = {}
        self._notes = notes

    def __contains__(self, tensor: Any) -> bool:
        return id(tensor) in self._tensors

    def find(self, optimizer: Any) -> None:
        """Find out which elements of parameters an optimizer's flat tensors hold; once, before the first update."""
        strangers = [
            t
            for g in optimizer.param_groups
            for t in g["params"]
            if id(t) not in self._models.names.parameters and id(t) not in self._tensors and torch.is_floating_point(t)
        ]
        if not strangers:
            return
        values = {n: local_of(p.detach()).float().flatten().cpu().numpy() for n, p in self._models.parameters()}
        flats = [local_of(t.detach()).float().flatten().cpu().numpy() for t in strangers]
        grads = Gradients(
            [_flat_gradient(t) for t in strangers],
            {n: g for n, p in self._models.parameters() if (g := _flat_gradient(p)) is not None and g.shape == values[n].shape},
        )
        spans = find_spans(flats, values, grads)
        if not all(spans):  # masters that were made before their weights were rounded
            short = {n: p.dtype for n, p in self._models.parameters() if p.dtype in _SHORT}
            taken = {s.name for found in spans for s in found}
            for dtype in set(short.values()):
                theirs = {n: v for n, v in values.items() if short.get(n) == dtype and n not in taken}
                lost = [i for i, found in enumerate(spans) if not found]
                for i, found in zip(lost, find_spans([_rounded(flats[i], dtype) for i in lost], theirs), strict=True):
                    spans[i] = found
        for tensor, found in zip(strangers, spans, strict=True):
            self._tensors[id(tensor)] = tensor
            self._spans[id(tensor)] = found
        if unknown := [t for t, found in zip(strangers, spans, strict=True) if not found]:
            self._notes.append(
                f"{type(optimizer).__name__} updates {len(unknown)} tensor{'s' if len(unknown) > 1 else ''} ({sum(t.numel() for t in unknown):,} numbers) that hold "
                "no parameter's values: not compared"
            )

    def spans(self, tensor: Any) -> list[Span]:
        """Where the elements of a tensor belong; nothing of what was not found."""
        return self._spans.get(id(tensor), [])

    def parts(self, tensor: Any, value: torch.Tensor) -> Iterator[tuple[Span, torch.Tensor]]:
        """A value with an element for each of a tensor's, in pieces by parameter."""
        flat = local_of(value.detach()).flatten()
        for span in self.spans(tensor):
            yield span, flat[span.at : span.at + span.stop - span.start]

    def copy_parameters(self) -> None:
        """Have the tensors hold what the parameters hold now."""
        named = dict(self._models.parameters())
        with torch.no_grad():
            for key, tensor in self._tensors.items():
                flat = local_of(tensor.detach()).view(-1)
                for span in self._spans[key]:
                    values = local_of(named[span.name].detach()).flatten()[span.start : span.stop]
                    flat[span.at : span.at + values.numel()] = values.to(flat.dtype)

    def clear(self) -> None:
        """Let go of the tensors."""
        self._tensors.clear()


def gradient_of(tensor: Any) -> Any:
    """A parameter's gradient, the one that is kept in higher precision where there is such a one; `None` without any."""
    return next((g for a in _GRADS if (g := getattr(tensor, a, None)) is not None), None)


def _rounded(values: Any, dtype: torch.dtype) -> Any:
    return torch.from_numpy(values).to(dtype).float().numpy()


def _flat_gradient(tensor: Any) -> Any:
    grad = gradient_of(tensor)
    return None if grad is None else local_of(grad.detach()).float().flatten().cpu().numpy()
