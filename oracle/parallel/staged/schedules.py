"""1F1B: a microbatch goes back as soon as it can, so a rank keeps the graphs of as many microbatches as stages follow, and not of all.

A script of one device calls `backward` once, after the forward of all rows. So each microbatch's own loss, which the model gives, goes back
within the forward; what it gives the parameters is kept, and handed over when the script calls `backward`, times what the script made of the loss.
Order: PipeDream-Flush (Narayanan et al., 2021, §2.2). Where a rank has several stages, each microbatch goes back before the next one begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from proctor.errors import OracleError
from proctor.oracle.parallel.crossing.edges import changed


class Gone(NamedTuple):
    """Microbatches that have gone forward and back.

    Args:
        outputs: of each, without graphs.
        path: of the loss in them.
        gradients: of the mean of the losses, in the order of the parameters; None where there is none.
    """

    outputs: list[Any]
    path: str
    gradients: list[torch.Tensor | None]


def forward_and_back(
    forwards: Iterable[Callable[[], Any]], count: int, ahead: int, parameters: Sequence[torch.nn.Parameter], anchor: torch.Tensor
) -> Gone:
    """Carry out microbatches in the order of 1F1B.

    Args:
        forwards: compute one microbatch each.
        count: of microbatches.
        ahead: how many go forward before the first goes back.
        parameters: of this rank that want gradients.
        anchor: on which everything that sends gradients to other ranks depends.

    Raises:
        OracleError: the model gives no loss of its own.
    """
    outputs: list[Any] = []
    waiting: deque[torch.Tensor] = deque()
    kept: list[torch.Tensor | None] = [None] * len(parameters)
    path = ""

    def back() -> None:
        loss = waiting.popleft()
        found = torch.autograd.grad(loss, [*parameters, anchor], torch.full_like(loss, 1 / count), allow_unused=True)
        for i, gradient in enumerate(found[:-1]):
            if gradient is not None:
                before = kept[i]
                kept[i] = gradient if before is None else before.add_(gradient)

    for number, forward in enumerate(forwards):
        output = forward()
        path, loss = _loss(output)
        waiting.append(loss)
        outputs.append(changed(output, lambda _, tensor: tensor.detach()))
        del output, loss
        if number >= ahead - 1:
            back()
    while waiting:
        back()
    return Gone(outputs, path, kept)


def _loss(output: Any) -> tuple[str, torch.Tensor]:
    found: list[tuple[str, torch.Tensor]] = []

    def look(path: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0 and tensor.is_floating_point() and tensor.requires_grad:
            found.append((path, tensor))
        return tensor

    changed(output, look)
    if len(found) != 1:
        said = "none" if not found else f"{len(found)} of them"
        raise OracleError(
            f"1f1b needs a model that gives its loss: one single number that wants a gradient, and there is {said}",
            hint='let the forward compute it, or schedule = "gpipe"',
        )
    return found[0]


def handed_over(output: Any, gone: Gone, parameters: Sequence[torch.nn.Parameter]) -> Any:
    """The merged output, with a loss whose backward gives the parameters what is kept for them."""
    held = [(p, g) for p, g in zip(parameters, gone.gradients) if g is not None]
    pairs = [p for p, _ in held], [g for _, g in held]
    return changed(output, lambda path, tensor: _Kept.apply(tensor, pairs[1], *pairs[0]) if path == gone.path else tensor)


class _Kept(torch.autograd.Function):  # type: ignore[misc]  # torch is not typed here
    """A loss that is known; its gradients are too."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, kept: list[torch.Tensor], *parameters: torch.Tensor) -> torch.Tensor:
        ctx.kept = kept
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.kept is None:
            raise OracleError("under 1f1b one backward goes through one forward", hint='schedule = "gpipe"')
        kept, ctx.kept = ctx.kept, None
        return None, None, *((one * gradient).to(one.dtype) for one in kept)
