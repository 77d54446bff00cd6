"""What the moments of an optimizer are made of: their old value, the gradient, its square, the parameter.

At the first updates some elements of some parameters are read, with all tensors of their state that have their shape; behind the update each state is written as a sum of
these four by least squares. A row of `Value.MANNER` for each kind of state says which of them it has, if that explains it to rounding for all parameters. A row of
`Value.KEPT` says whether all parameters of a group keep the same share of their old state, and whether their lengths are their own (`decay`): who scales a moment in place, while he
computes the update, breaks one or the other.

Cost: about 0.2 ms a parameter, of eight parameters in four updates.
"""

from __future__ import annotations

import itertools
from typing import Any, Final

import numpy as np

from proctor.instrument.observe.content import array_of
from proctor.instrument.probes import NO_HOOKS, EarlyProbe, Home, Hooks, Sink, register
from proctor.invariants.schema import Value

_UPDATE: Final = "torch.optim.Optimizer.step"
_PARAMETERS: Final = 8
_ELEMENTS: Final = 192
_FEWEST: Final = 12
_LARGEST: Final = 1 << 22
_STATES: Final = 4
_TERMS: Final = ("its old value", "the gradient", "the square of the gradient", "the parameter")
_APART: Final = 0.25  # relative, by which shares of old states differ where they are not rounding
_SAME: Final = 1.02  # lengths of moments of different parameters differ by more
_ALIKE: Final = 10.0  # condition number beyond which terms in a half type are too alike; of float32 a hundred times that
_ROUNDING: Final = {"float32": 2e-5, "float64": 2e-5, "bfloat16": 0.012, "float16": 0.002}

Numbers = np.ndarray[Any, Any]


class _Open:
    """A parameter before an update."""

    def __init__(self, parameter: Any, grad: Any, group: int, state: Any) -> None:
        self.parameter, self.group = parameter, group
        self.gradient, self.data = _read(grad), _read(parameter)
        self.old = {key: _read(value) for key, value in list(state.items())[:16] if _like(value, parameter)}
        self.lengths = {key: float(state[key].detach().norm()) for key in self.old}


@register
class Moments(EarlyProbe):
    """Recurrences of optimizer states."""

    name = "moments"
    kinds = frozenset({Value.MANNER, Value.KEPT})
    looks = 8

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._open: tuple[Any, list[_Open]] | None = None

    def hooks(self, function: str, home: Home) -> Hooks:
        return (self._before, self._after) if function == _UPDATE else NO_HOOKS

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        self._open = None
        optimizer = args[0]
        if self.left <= 0 or not optimizer.state or len(args) > 1 or kwargs:  # a closure makes gradients of its own
            return
        self.left -= 1
        found: list[_Open] = []
        for i, group in enumerate(optimizer.param_groups):
            for p, grad in zip(group["params"], self.sink.gradients(group["params"]) or ()):
                if len(found) < _PARAMETERS and grad is not None and p in optimizer.state and _like(p, p) and _like(grad, p):
                    opened = _Open(p, grad, i, optimizer.state[p])
                    if opened.old:
                        found.append(opened)
        self._open = (optimizer, found) if found else None

    def _after(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        opened, self._open = self._open, None
        if opened is None or raised or opened[0] is not args[0]:
            return
        optimizer, before = opened
        fits: dict[str, list[tuple[_Open, Numbers | None]]] = {}
        lengths: dict[str, list[float]] = {}
        for one in before:
            state = optimizer.state.get(one.parameter, {})
            for key in list(one.old)[:_STATES]:
                if _like(state.get(key), one.parameter):
                    new = _read(state[key])
                    lengths.setdefault(key, []).extend((one.lengths[key], float(state[key].detach().norm())))
                    fits.setdefault(key, []).append((one, fit(new, (one.old[key], one.gradient, one.gradient**2, one.data), _ROUNDING[_dtype(state[key])])))
        for key, told in fits.items():
            self._tell(type(optimizer).__name__, key, told, lengths[key])

    def _tell(self, kind: str, key: str, told: list[tuple[_Open, Numbers | None]], lengths: list[float]) -> None:
        known = [(one, shares) for one, shares in told if shares is not None]
        if not known:
            return
        place = f"{key} of {kind}"
        if len(known) == len(told):
            terms = {term for _, shares in known for term, share in zip(_TERMS, shares) if share}
            self.sink.number(place, float(len(known)), kind=Value.MANNER, facts={"mode": "moment", "has": " and ".join(t for t in _TERMS if t in terms)})
        apart = [(a[0], b[0]) for (one, a), (other, b) in itertools.pairwise(known) if one.group == other.group and a[0] and b[0] and abs(a[0] - b[0]) > _APART * max(abs(a[0]), abs(b[0]))]
        seen = f"{place} keeps {apart[0][0]:.3g} times its old value for one parameter, and {apart[0][1]:.3g} times for another of the same group" if apart else ""
        if len(lengths) > 2 and min(lengths) > 0 and max(lengths) < _SAME * min(lengths):
            seen = f"{place} has length {lengths[-1]:.3g} for all {len(told)} parameters, before and behind the update"
        self.sink.number(place, float(len(known)), kind=Value.KEPT, facts={"what": "decay", "seen": seen})


def fit(new: Numbers, terms: tuple[Numbers, ...], rounding: float) -> Numbers | None:
    """Shares of terms in a sum that is `new`; 0 where a term has none. `None` where no sum explains it, terms are too alike to be told apart,
    or the first one, the old value, is so small beside the sum that all of it would be lost in rounding."""
    sizes = np.array([np.linalg.norm(t) for t in terms])
    size = float(np.linalg.norm(new))
    used = np.flatnonzero(sizes > 0)
    if not size > 0 or not len(used) or not np.isfinite(size) or not np.isfinite(sizes).all() or 0 < sizes[0] <= rounding * size:
        return None
    matrix = np.stack([terms[i] / sizes[i] for i in used], axis=1)
    if np.linalg.cond(matrix) > max(_ALIKE, 0.02 / rounding):
        return None
    # Terms that do not matter are left out, the least one first: each would take up rounding of the others.
    kept = list(range(len(used)))
    shares = np.linalg.lstsq(matrix, new, rcond=None)[0]
    if np.linalg.norm(matrix @ shares - new) > rounding * size:
        return None
    while len(kept) > 1:
        tries = [[k for k in kept if k != out] for out in kept]
        errors = [float(np.linalg.norm(matrix[:, t] @ np.linalg.lstsq(matrix[:, t], new, rcond=None)[0] - new)) for t in tries]
        best = int(np.argmin(errors))
        if errors[best] > rounding * size:
            break
        kept = tries[best]
    found = np.zeros(len(terms))
    found[used[kept]] = np.linalg.lstsq(matrix[:, kept], new, rcond=None)[0] / sizes[used[kept]]
    return found


def _read(tensor: Any) -> Numbers:
    """Some elements of a tensor, spread over it."""
    flat = tensor.detach().reshape(-1)
    step = max(1, flat.numel() // _ELEMENTS)
    return array_of(flat[::step][:_ELEMENTS].double())


def _like(value: Any, parameter: Any) -> bool:
    """A dense CPU tensor of the parameter's shape that can be read."""
    import torch

    plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.device.type == "cpu" and value.layout is torch.strided
    return plain and value.shape == parameter.shape and _FEWEST <= value.numel() <= _LARGEST and value.is_contiguous() and _dtype(value) in _ROUNDING


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")
