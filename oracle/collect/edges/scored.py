"""Log-probabilities of the tokens that a model reads, one number a token, where only statistics are kept: of sums over tiles of its logits nobody could tell them.

They are formed where the logits leave the model. The token that a forward reads first is scored by the logits of the forward before it, as an
engine reads what it generated last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from proctor.oracle.collect.edges.running import Place
from proctor.oracle.collect.finding.roots import Meta, local_of
from proctor.oracle.collect.tape import Tape
from proctor.oracle.tensors import EVALUATION, NOT_SCORED

_AT_ONCE: Final = 1 << 22  # logits that are widened to float64 together: 32 MiB


class Scored:
    """Outermost modules of a process, of which some read tokens and give logits.

    Args:
        tape: records.
    """

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._read: torch.Tensor | None = None
        self._last: dict[str, tuple[int, torch.Tensor]] = {}  # by model: its forward before, and the logits of its last position

    def reads(self, values: Any) -> None:
        """A model is called; rows × positions of whole numbers are tokens, the first of such tensors."""
        found = (local_of(x) for x in pytree.tree_leaves(values) if isinstance(x, torch.Tensor) and x.ndim == 2 and x.dtype in (torch.int64, torch.int32))
        self._read = next((x for x in found if x.numel()), None)

    def gives(self, meta: Meta, place: Place, values: Any) -> None:
        """It returns; records rows × positions, `NOT_SCORED` where no logits are known that come before a token."""
        read, self._read = self._read, None
        logits = _logits(pytree.tree_leaves(values), read) if read is not None else None
        if read is None or logits is None:
            return
        read = read.detach()
        scores = torch.full(tuple(read.shape), NOT_SCORED, dtype=torch.float64)
        before = self._last.get(meta[0])
        if before is not None and before[0] == place.call - 1 and before[1].shape[0] == read.shape[0]:
            scores[:, :1] = scores_of(before[1], read[:, :1])
        behind = logits.shape[1] - 1  # logits may be there of the last positions only
        if behind:
            scores[:, -behind:] = scores_of(logits[:, :-1], read[:, -behind:])
        self._last[meta[0]] = place.call, logits[:, -1:].clone()
        self._tape.record(scores, call=place.call, kind="logprob", meta=meta, slot="", phase=EVALUATION)


def _logits(leaves: Sequence[Any], read: torch.Tensor) -> torch.Tensor | None:
    """The first tensor of rows × positions × vocabulary; of a DTensor only one that this rank has as a whole."""
    for x in leaves:
        if not isinstance(x, torch.Tensor) or x.ndim != 3 or not x.is_floating_point():
            continue
        local = local_of(x.detach())
        if local.shape == x.shape and x.shape[0] == read.shape[0] and 0 < x.shape[1] <= read.shape[1]:
            return local
    return None


def scores_of(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of tokens.

    Args:
        logits: rows × positions × vocabulary.
        following: the token behind each position, rows × positions.

    Returns:
        float64, rows × positions; 0 of what is no token.
    """
    out = torch.zeros(tuple(following.shape), dtype=torch.float64)
    size = max(1, _AT_ONCE // max(1, logits.shape[0] * logits.shape[2]))
    for begin in range(0, following.shape[1], size):
        part, tokens = logits[:, begin : begin + size].double(), following[:, begin : begin + size].long()
        inside = (tokens >= 0) & (tokens < part.shape[-1])
        at = part.gather(-1, torch.where(inside, tokens, 0)[..., None])[..., 0] - part.logsumexp(-1)
        out[:, begin : begin + size] = torch.where(inside, at, 0.0).cpu()
    return out
