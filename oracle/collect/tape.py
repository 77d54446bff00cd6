"""What one process records: tensors with the step they belong to, and what is said of the process as a whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from proctor.instrument.guard import say
from proctor.oracle.collect.finding.roots import Meta, local_of
from proctor.oracle.collect.progress import Progress
from proctor.oracle.collect.summaries import summarise
from proctor.oracle.store import ProcessInfo, RankWriter
from proctor.oracle.store.ended import Whereabouts
from proctor.oracle.tensors import DTYPES

# What is recorded of every step; the rest is large, and of the steps that are recorded in full.
_EACH_STEP = frozenset({"param", "main_grad", "param_after", "scalar", "buffer", "buffer_after", "score", "choice", "dropped", "mask", "op"})
_DTYPES = {getattr(torch, name): name for name in DTYPES}


class Tape:
    """The recording of a process; until it is opened, and after it is closed, tensors are left out.

    Args:
        progress: tells the step.
        fp8: modules that cast to 8-bit floats inside, as far as they are known.
        whole: steps that are recorded in full; () all.
        statistics: sums over tiles are kept in the place of tensors.
        positions: … of which those of a sequence stay apart.

    Attributes:
        info: what is said of the process.
        fp8: all such modules.
        only: the kind of tensor that is recorded; "" every kind.
        waits: of training nothing more is recorded, only the evaluation that is to come.
    """

    def __init__(self, progress: Progress, fp8: Iterable[str], whole: Iterable[int] = (), *, statistics: bool = False, positions: bool = False) -> None:
        self.info = ProcessInfo(rank=0, world=1, pid=os.getpid())
        self.fp8 = set(fp8)
        self.only = ""
        self.waits = False
        self._progress = progress
        self._whole = frozenset(whole)
        self._statistics, self._positions = statistics, positions
        self._writer: RankWriter | None = None
        self._where: Whereabouts | None = None

    def open(self, folder: Path) -> None:
        """Begin to write.

        Args:
            folder: the rank's; it is made.

        Raises:
            FileExistsError: it is there.
        """
        from safetensors.torch import save_file

        self._writer = RankWriter(folder, save_file)
        self._where = Whereabouts(folder)

    def at(self, module: str) -> None:
        """A module is called: what is known of a process that is killed."""
        if self._where is not None:
            self._where.at(self._progress.step, module)

    def running(self) -> bool:
        """Whether tensors are recorded."""
        return self._writer is not None

    def whole(self) -> bool:
        """Whether this step is recorded in full."""
        return not self._whole or self.waits or self._progress.step in self._whole

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether tensors of its type can be kept."""
        return tensor.dtype in _DTYPES

    def record(
        self,
        tensor: Any,
        *,
        call: int,
        kind: str,
        meta: Meta,
        slot: str,
        recompute: bool = False,
        span: tuple[int, int] | None = None,
        phase: str = "",
    ) -> None:
        """Keep a copy of a tensor as it is now.

        Args:
            tensor: of a DTensor this rank's part is kept; of a type that the store does not know, nothing.
            call: of the module, in this step.
            kind: as of `store.Entry`.
            meta: name, class and `file:line` of what it belongs to.
            slot: tells it from others of the same kind and name.
            recompute: it was computed again in a backward pass.
            span: elements of the parameter that it holds, where that is not all of it.
            phase: as of `store.Entry`; who evaluates sees to what is kept of it.
        """
        if self._writer is None or (self.only and kind != self.only) or (self.waits and not phase):
            return
        if not phase and (not self.whole() and kind not in _EACH_STEP):
            return
        placement = _placement(tensor)
        local = local_of(tensor.detach() if hasattr(tensor, "detach") else tensor)
        if local.dtype not in _DTYPES:
            return
        said: dict[str, Any] = {}  # Any: fields of an entry
        if self._statistics and span is None:
            local, said = summarise(local, kind, positions=self._positions)
        kept = local.to("cpu", copy=True, memory_format=torch.contiguous_format).contiguous()
        name, cls, source = meta
        self._writer.add(
            kept,
            dtype=_DTYPES[kept.dtype],
            size=kept.numel() * kept.element_size(),
            step=self._progress.step,
            call=call,
            kind=kind,
            name=name,
            slot=slot,
            cls=cls,
            source=source,
            placement=placement,
            span=span,
            recompute=recompute,
            fp8=name in self.fp8,
            phase=phase,
            **said,
        )

    def scalar(self, name: str, value: Any, *, call: int = 0) -> Any:
        """Record a number; returns it, of a DTensor the whole."""
        full = value.full_tensor() if hasattr(value, "full_tensor") and name != "loss" else value
        self.record(full.detach().reshape(()), call=call, kind="scalar", meta=(name, "", ""), slot="")
        return full

    def flush(self) -> None:
        """Write what waits."""
        if self._writer is not None:
            self._writer.flush()

    def close(self, others: Iterable[Callable[[Path], None]]) -> None:
        """Write the rest; what cannot be written is said, and the program goes on.

        Args:
            others: write files of their own into the folder, before it is said to be whole.
        """
        if self._writer is None:
            return
        try:
            for write in others:
                write(self._writer.folder)
            self._writer.close(self.info)
        except Exception as e:  # noqa: BLE001 - a full disk is said, the program goes on
            say(f"oracle: cannot write {self._writer.folder}: {e}")
        if self._where is not None:
            self._where.close()
        self._writer = self._where = None


def _placement(tensor: Any) -> dict[str, Any] | None:
    if not hasattr(tensor, "placements") or not hasattr(tensor, "device_mesh"):
        return None
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or tuple(f"mesh{i}" for i in range(mesh.ndim))
    return {
        "axes": list(names),
        "sizes": [int(s) for s in mesh.mesh.shape],
        "placements": [str(p) for p in tensor.placements],
        "shape": [int(s) for s in tensor.shape],
    }
