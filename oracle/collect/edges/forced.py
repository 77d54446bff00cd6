"""Values that take the place of a program's own at the edges of its modules: one safetensors file a rank.

Prepared by `oracle/localising/localise.py` (the reference's values, for the candidate) and by `oracle/recording/inputs.py` (generated data, for
both sides). Keys name edge, module, slot and call.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from proctor.oracle.collect.config import CollectConfig
from proctor.oracle.collect.finding.roots import local_of
from proctor.oracle.tensors import key_of


class Forced:
    """The replacements of one rank.

    Args:
        folder: holds `rank<r>.safetensors`.
        rank: this process's.
    """

    def __init__(self, folder: str, rank: int) -> None:
        from safetensors import safe_open

        self._file: Any = safe_open(str(Path(folder) / f"rank{rank}.safetensors"), framework="pt")
        self._keys = set(self._file.keys())  # type: ignore[no-untyped-call]

    def holds(self, step: int, kind: str, name: str, slot: str, call: int) -> bool:
        """Whether there is a value for a place."""
        return key_of(step, kind, name, slot, call) in self._keys

    def __call__(self, step: int, kind: str, name: str, slot: str, call: int, value: torch.Tensor) -> torch.Tensor | None:
        """What is to be used instead of a value; `None` where there is nothing for it."""
        key = key_of(step, kind, name, slot, call)
        if key not in self._keys:
            return None
        local = local_of(value)
        other: torch.Tensor = self._file.get_tensor(key).to(device=local.device, dtype=local.dtype)
        if other.shape != local.shape:
            return None
        if not hasattr(value, "placements"):
            return other.clone()
        return type(value).from_local(other.clone(), value.device_mesh, value.placements, shape=value.shape, stride=value.stride())

    def alike(self, step: int, kind: str, name: str, slots: Sequence[str], call: int, value: torch.Tensor) -> bool:
        """Whether one tensor that goes to several places is to be the same in all of them."""
        first, *rest = (self(step, kind, name, s, call, value) for s in slots)
        if first is None:
            return all(o is None for o in rest)
        return all(o is not None and torch.equal(local_of(o), local_of(first)) for o in rest)

    def gradient(self, step: int, name: str) -> torch.Tensor | None:
        """The reference's gradient of this rank's part of a parameter, flat; `None` where there is none."""
        key = key_of(step, "main_grad", name, "", 0)
        if key not in self._keys:
            return None
        found: torch.Tensor = self._file.get_tensor(key)
        return found.flatten()


class Supplied:
    """What a process is given in the place of its own values; nothing until it is read.

    Attributes:
        force: inputs and incoming gradients of modules, and gradients that optimizers use: the reference's.
        given: generated values of the program's data.
        choices: choices and masks.
    """

    def __init__(self) -> None:
        self.force: Forced | None = None
        self.given: Forced | None = None
        self.choices: Forced | None = None

    def read(self, config: CollectConfig, rank: int) -> None:
        """Take what a rank is given."""
        if config.force:
            self.force = Forced(config.force, rank)
        if config.given:
            self.given = Forced(config.given, rank)
        self.choices = Forced(config.decisions, rank) if config.decisions else self.force
