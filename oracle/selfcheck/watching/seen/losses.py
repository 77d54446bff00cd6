"""What a sample weighs in the loss: torch's loss functions are watched, and the gradient that comes back to their results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.nn import functional as F

from proctor.oracle.selfcheck.watching.parting import program_line
from proctor.oracle.selfcheck.watching.step import Call, Criterion, Outputs

FUNCTIONS: Final = (
    "cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss",
    "kl_div", "poisson_nll_loss", "soft_margin_loss", "multilabel_margin_loss", "margin_ranking_loss", "hinge_embedding_loss", "cosine_embedding_loss",
)  # fmt: skip
MAX_TARGETS: Final = 1 << 22


class Losses:
    """Watches loss functions.

    Attributes:
        criteria: calls since `begin`.
        backwards: gives the number of backward passes since then.
    """

    def __init__(self, backwards: Callable[[], int], guard: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
        self.criteria: list[Criterion] = []
        self._backwards, self._guard = backwards, guard
        self._inside = 0
        self._originals: dict[str, Any] = {}

    def install(self) -> None:
        """Wrap them, before the program binds their names."""
        for name in FUNCTIONS:
            original = getattr(F, name, None)
            if original is not None:
                self._originals[name] = original
                setattr(F, name, self._around(name, original))

    def remove(self) -> None:
        """Put them back; names that the program bound stay wrapped, and do nothing more."""
        for name, original in self._originals.items():
            setattr(F, name, original)
        self._inside = 1 << 30

    def begin(self) -> None:
        """Another update begins."""
        self.criteria = []

    def _around(self, name: str, original: Any) -> Any:
        see = self._guard(self._see)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            self._inside += 1
            try:
                result = original(*args, **kwargs)
            finally:
                self._inside -= 1
            if not self._inside and torch.is_grad_enabled():
                see(name, args, kwargs, result)
            return result

        return wrapper

    def _see(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if not isinstance(result, torch.Tensor) or not result.requires_grad:
            return
        target = args[1] if len(args) > 1 else kwargs.get("target")
        items = target.numel() if isinstance(target, torch.Tensor) else 0
        ignored, kept = 0, None
        if isinstance(target, torch.Tensor) and not target.is_floating_point() and target.numel() <= MAX_TARGETS:
            index = kwargs.get("ignore_index", -100)
            if name in ("cross_entropy", "nll_loss"):
                ignored = int((target == index).sum())
                kept = target.detach().clone()
        found = Criterion(name, str(kwargs.get("reduction", "mean")), items - ignored, ignored, program_line(), targets=kept)
        self.criteria.append(found)
        if result.numel() != 1:
            return

        def weigh(grad: torch.Tensor) -> None:
            found.weight = float(grad)
            found.backward = self._backwards() - 1

        result.register_hook(self._guard(weigh))


def scored(call: Call, args: Any = None) -> Outputs:
    """What torch's losses are given while a model is evaluated: the results of a model that returns its loss alone.

    Args:
        call: whose model.
        args: `(args, kwargs)`; those of the real step without.
    """
    found: Outputs = {}
    originals = {name: getattr(F, name) for name in FUNCTIONS}

    def spy(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(*given: Any, **named: Any) -> Any:
            scores = given[0] if given else named.get("input")
            if isinstance(scores, torch.Tensor):
                found[f"{name}.{len(found)}"] = scores.detach().clone()
            return original(*given, **named)

        return wrapper

    try:
        for name, original in originals.items():
            setattr(F, name, spy(name, original))
        call.evaluate(args)
    finally:
        for name, original in originals.items():
            setattr(F, name, original)
    return found
