"""Buffers of a process: what modules keep beside parameters, such as running statistics, before the first step and where a step changed it."""

from __future__ import annotations

import hashlib

import torch

from proctor.oracle.collect.finding.models import Models
from proctor.oracle.collect.finding.roots import local_of
from proctor.oracle.collect.tape import Tape


class Buffers:
    """The buffers of the models that train.

    Args:
        models: have them.
        tape: records.
    """

    def __init__(self, models: Models, tape: Tape) -> None:
        self._models, self._tape = models, tape
        self._seen: dict[str, bytes] = {}  # digests of what was recorded last

    def record_before(self) -> None:
        """As the first step finds them."""
        self._record("buffer")

    def record_after(self) -> None:
        """Those that a step has changed."""
        self._record("buffer_after")

    def _record(self, kind: str) -> None:
        for name, buffer in self._models.buffers():
            if buffer.is_meta or buffer.layout != torch.strided or not self._tape.knows(buffer):
                continue
            found = _digest(buffer)
            if self._seen.get(name) != found:
                self._seen[name] = found
                self._tape.record(buffer, call=0, kind=kind, meta=self._models.owner(name), slot="")


def _digest(buffer: torch.Tensor) -> bytes:
    local = local_of(buffer.detach()).cpu().contiguous()
    return hashlib.blake2b(local.flatten().view(torch.uint8).numpy().data, digest_size=16).digest()
