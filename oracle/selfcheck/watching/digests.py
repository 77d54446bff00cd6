"""Digests of the first steps of a process, in the order of the dataflow: what two runs of one program are compared by.

A line is a digest, what it is of, and where: parameters at the start, inputs of roots, results of every module, gradients and parameters of updates.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch
from torch import nn

from proctor.oracle.selfcheck.facts import DIGESTS, Line
from proctor.oracle.selfcheck.watching.fork import random_states
from proctor.oracle.selfcheck.watching.parting import program_line
from proctor.oracle.selfcheck.watching.step import written_at
from proctor.oracle.selfcheck.watching.values import tensors

if TYPE_CHECKING:
    from proctor.oracle.selfcheck.watching.watch import Watch

MAX_LINES: Final = 20_000
MAX_ROWS: Final = 4096


class Digests:
    """Writes them.

    Args:
        folder: of the process.
        watch: of the process.
    """

    def __init__(self, folder: Path, watch: Watch) -> None:
        self._file = open(folder / DIGESTS, "wb")  # noqa: SIM115 - open as long as the process is watched
        self._watch, self._count, self._step = watch, 0, 0
        self._names: dict[int, str] = {}
        self._known: set[int] = set()
        self._states: dict[int, Any] = {}  # of the generators, where a root began

    def output(self, module: nn.Module, result: Any) -> None:
        """A module returned."""
        if self._watch.over or torch.compiler.is_compiling():
            return
        self._watch.guarded(self._output)(module, result)

    def update(self, optimizer: Any, number: int) -> None:
        """An optimizer is about to step; gradients, and what the last update made of the parameters."""
        names = {id(p): n for root in self._watch.roots.values() for n, p in root.named_parameters()}
        for at, parameter in enumerate(p for g in optimizer.param_groups for p in g["params"]):
            name = names.get(id(parameter), f"{type(optimizer).__name__}.{at}")
            self._write(parameter.grad, "gradient", name, "")
            self._write(parameter, "update" if number else "parameter", name, "")
        self._step = number + 1

    def clipped(self, norm: Any) -> None:
        """Gradients are about to be clipped by their norm."""
        if not self._watch.over and self._watch.config.rows:
            self._line(Line("", "norm", "", self._step, program_line(), [], float(norm)))

    def close(self) -> None:
        """No more."""
        self._file.close()

    def given(self, module: nn.Module, inputs: Any) -> None:
        """A root module is called; its parameters at the start, and its batch."""
        for root in self._watch.roots.values():
            if id(root) in self._known:
                continue
            self._known.add(id(root))
            for name, part in root.named_modules():
                self._names.setdefault(id(part), name or type(root).__name__)
            for name, parameter in root.named_parameters():
                self._write(parameter, "parameter", name, written_at(root))
        name = self._names.get(id(module), type(module).__name__)
        for path, tensor in tensors(inputs):
            self._write(tensor, "input", f"{name} {path.partition('.')[2]}", program_line())
        self._states = {id(module): _states()} if self._watch.config.rows else {}

    def _output(self, module: nn.Module, result: Any) -> None:
        name = self._names.get(id(module), type(module).__name__)
        if id(module) in self._states and self._states.pop(id(module)) != _states():
            self._line(Line("", "drew", name, self._step, written_at(module)))
        for path, tensor in tensors(result):
            self._write(tensor, "result", f"{name}.{path}" if path else name, written_at(module) or program_line())

    def _write(self, tensor: Any, kind: str, name: str, source: str) -> None:
        if not isinstance(tensor, torch.Tensor) or tensor.is_meta or tensor.layout != torch.strided or self._count >= MAX_LINES:
            return
        whole = tensor.detach().cpu()
        rows, size = [], 0.0
        if self._watch.config.rows:
            rows = [[_digest(part) for part in whole.unbind(axis)] for axis in range(min(2, whole.ndim)) if whole.size(axis) <= MAX_ROWS] if kind == "input" else []
            size = float(whole.double().norm()) if kind == "gradient" else 0.0
        self._line(Line(_digest(whole), kind, name, self._step, source, rows, size))

    def _line(self, line: Line) -> None:
        self._count += 1
        self._file.write(msgspec.json.encode(line) + b"\n")


def _digest(tensor: torch.Tensor) -> str:
    plain = tensor.contiguous().reshape(-1)
    digest = hashlib.blake2b(plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b"", digest_size=12, person=str(tensor.dtype)[6:22].encode())
    digest.update(str(tuple(tensor.shape)).encode())
    return digest.hexdigest()


def _states() -> list[bytes]:
    """Of the generators of torch, numpy and Python."""
    return [hashlib.blake2b(pickled).digest() for pickled in (repr(state).encode() if not isinstance(state, torch.Tensor) else state.numpy().tobytes() for state in random_states())]
