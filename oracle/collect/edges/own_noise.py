"""Noise within a module that computes much by itself, for runs from which tolerances are estimated.

Noise at the edges of modules stands for the rounding of what they do. A model that is one module with a functional body
has only its own edges, and rounds some hundred times in between. So every result of the own operations of a module with
more than `FEW` of them gets noise, forward and backward, and so do the gradients of the parameters that they use. Modules
with fewer get none, which is most of them: the estimate there stays what was measured. A run without noise counts first.

Measured: a GPT of four layers as one function, compiled by inductor, was off from its eager self by up to 2.7 (float32) and
4.8 (bfloat16) tolerances without this, by 0.54 and 0.80 with it, each the worst tensor of three seeds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from proctor.oracle.collect.edges.running import Place
from proctor.oracle.collect.edges.taps import UNIT_ROUNDOFF, noisy, tap

FEW: Final = 8
TIMES: Final = 3.0  # roundings: a value at an edge is mostly at that of its parent too, and gets noise at each


class OwnOperations(TorchFunctionMode):  # type: ignore[misc]
    """While it is entered, operations of the innermost running module are counted, and those of some modules get noise.

    Args:
        seed: of the noise sample; `None` only counts.
        names: of the modules whose results get noise.
        running: calls of modules that run now.

    Attributes:
        busy: modules with more than `FEW` operations in a call.
        watching: it is entered.
    """

    def __init__(self, seed: int | None, names: Collection[str], running: Sequence[Place]) -> None:
        super().__init__()
        self._seed, self._names, self._running = seed, frozenset(names), running
        self._counts: dict[Place, int] = {}
        self._inside = False
        self._parameters: dict[int, Any] = {}  # by id; what takes the noise off its gradient
        self.busy: set[str] = set()
        self.watching = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._inside or type(result) is not torch.Tensor or not self._running:
            return result
        self._inside = True
        given = (*args, *(kwargs or {}).values())
        try:
            return self._seen(result, given, self._running[-1]) if _computed(result, given) else result
        except Exception:  # noqa: BLE001 - inside vmap and the like: it stays as it is
            return result
        finally:
            self._inside = False

    def __enter__(self) -> OwnOperations:
        self.watching = True
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.watching = False

    def entered(self, call: Place) -> None:
        """A call of a module begins."""
        self._counts[call] = 0

    def close(self) -> None:
        """Take everything off."""
        for handle in self._parameters.values():
            handle.remove()
        self._parameters.clear()

    def _seen(self, result: torch.Tensor, given: Sequence[Any], call: Place) -> torch.Tensor:
        count = self._counts[call] = self._counts.get(call, 0) + 1
        if count > FEW:
            self.busy.add(call[0])
        if self._seed is None or call[0] not in self._names:
            return result
        seed, sigma, key = self._seed, TIMES * UNIT_ROUNDOFF[result.dtype], (call[0], call[1], count)
        for parameter in given:
            if isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad and id(parameter) not in self._parameters:
                self._parameters[id(parameter)] = self._on_gradient(parameter, sigma, seed)

        def move(direction: str) -> Callable[[torch.Tensor], torch.Tensor]:
            return lambda value: noisy(value.detach(), sigma, seed, f"own_{direction}", *key)

        return tap(result, move("output"), move("grad"))

    def _on_gradient(self, parameter: torch.Tensor, sigma: float, seed: int) -> Any:
        """A gradient is a sum over rows, whose rounding is larger where it is large; noise before the sum averages out."""
        number, passes = len(self._parameters), itertools.count()
        return parameter.register_hook(lambda grad: noisy(grad.detach(), sigma, seed, "own_parameter", number, next(passes)))


def _computed(result: torch.Tensor, given: Sequence[Any]) -> bool:
    """A value that an operation rounded: no view of what it was given, nothing in place, and not a constant of the model."""
    if result.dtype not in UNIT_ROUNDOFF or (torch.is_grad_enabled() and (not result.requires_grad or result.is_leaf)):
        return False
    if not torch.is_grad_enabled() and not any(type(a) in (torch.Tensor, torch.nn.Parameter) and a.is_floating_point() for a in given):
        return False
    own = result.untyped_storage().data_ptr()
    return not any(a.untyped_storage().data_ptr() == own for a in given if type(a) in (torch.Tensor, torch.nn.Parameter))
