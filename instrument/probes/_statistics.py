"""Buffers of a copy of a model beside those of the model: read by `averages`, one object for each copy that is a module.

`stale`: the copy is evaluated with batch statistics that have stayed what they were, while its parameters moved towards the model and the model's statistics
moved. `strayed`: a buffer of the copy that was the model's leaves it, though the model's has not changed and the copy itself has not trained, or it holds what the model
has under another name.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

from proctor.instrument.observe import plainly
from proctor.instrument.observe.modules import buffer_of
from proctor.instrument.probes import _copies

_ELEMENTS: Final = 6  # of a buffer
_BUFFERS: Final = 64
_TELLING: Final = 3  # different elements, by which a buffer is known
_TIMES: Final = 2  # moves after which something is known to move


_Pair = tuple[str, "weakref.ref[Any]", "weakref.ref[Any]", str]  # name, module of the copy and of the model, name in it


class Statistics:
    """The buffers of one copy.

    Args:
        copy: the module.
        model: what it is a copy of.
    """

    def __init__(self, copy: Any, model: Any) -> None:
        self._copy = weakref.ref(copy)
        theirs = dict(plainly.named_modules(model))
        self._buffers: list[_Pair] = []  # what a module keeps there may be another tensor in each step
        for path, module in plainly.named_modules(copy):
            if path in theirs and len(self._buffers) < _BUFFERS:
                pair = (weakref.ref(module), weakref.ref(theirs[path]))
                self._buffers += [(f"{path}.{key}" if path else key, *pair, key) for key in list(module._buffers.keys()) if key in theirs[path]._buffers]  # a scripted module's are no dictionary
        self._norms = [name for name, module, _, key in self._buffers if _normalises(module()) and key in ("running_mean", "running_var")]
        self._seen: dict[str, tuple[list[float], list[float]]] = {}  # of the copy, of the model
        self._model_moves: dict[str, int] = {}
        self._copy_moved: set[str] = set()
        self._steps = 0
        self._trained = False

    def called(self) -> bool | str | None:
        """The copy, or what it lies in, is called: what is stale, True if nothing is, None where nothing can be said."""
        copy = self._copy()
        if copy is None or not self._buffers:
            return None
        if copy.training:
            self._trained = True
            return None
        moving = [name for name in self._norms if self._model_moves.get(name, 0) >= _TIMES]
        if self._steps < _TIMES or not moving:
            return None
        stale = next((name for name in moving if name not in self._copy_moved), None)
        return True if stale is None else f"{stale} is what it was when the copy was made, where the model's moves, and the copy is evaluated with it"

    def step(self, *, moved: bool) -> bool | str | None:
        """A step is over, in which the parameters of the copy moved or not: what strayed, True if nothing did, None if there was nothing to stray."""
        self._steps += moved
        trained, self._trained = self._trained, False
        told: bool | None = None
        strayed = ""
        for name, of_copy, of_model, key in self._buffers:
            buffer, theirs = ((buffer_of(module, key) if (module := ref()) is not None else None) for ref in (of_copy, of_model))
            if not _alike(buffer, theirs):
                continue
            now = (_copies.elements_of(buffer, _ELEMENTS), _copies.elements_of(theirs, _ELEMENTS))
            before = self._seen.get(name)
            self._seen[name] = now
            if before is None:
                continue
            self._model_moves[name] = self._model_moves.get(name, 0) + (now[1] != before[1])
            if now[0] != before[0]:
                self._copy_moved.add(name)
            if moved and not trained and before[0] == before[1] == now[1]:
                told = True
                if now[0] != before[0] and not strayed:
                    strayed = f"{name} was the model's and leaves it, though the model's has not changed"
        return strayed or (self._mixed() if moved else "") or told

    def _mixed(self) -> str:
        """A buffer that holds what another one of the model holds, and not what the model has under its name."""
        held: dict[tuple[float, ...], list[str]] = {}
        for name, (_, theirs) in self._seen.items():
            held.setdefault(tuple(theirs), []).append(name)
        for name, (mine, theirs) in self._seen.items():
            others = held.get(tuple(mine), []) if mine != theirs and len(set(mine)) >= _TELLING else []
            if len(others) == 1:
                return f"{name} holds what the model has as {others[0]}"
        return ""


def _alike(buffer: Any, theirs: Any) -> bool:
    """Two tensors that can be held against each other, and are two."""
    if buffer is None or theirs is None or buffer is theirs or buffer.shape != theirs.shape:
        return False
    return all(t.is_floating_point() and t.device.type == "cpu" and t.numel() > 0 for t in (buffer, theirs))


def _normalises(module: Any) -> bool:
    """Whether a module in evaluation mode uses statistics that it kept in training."""
    import torch

    return isinstance(module, torch.nn.modules.batchnorm._NormBase) and module.track_running_stats
