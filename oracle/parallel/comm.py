"""What ranks say to each other, over the axes of a mesh: processes by torch.distributed, or threads of one process.

`run` and `transitions` ask for nothing but these collectives, so the same plan runs under torchrun, as threads (`threads`),
and on one rank (`Alone`). Every method is called by all ranks of the group in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import FunctionType
from typing import Any, Final, Protocol

import torch

from proctor.errors import OracleError
from proctor.oracle.plans.mesh import Mesh

REDUCTIONS: Final = ("sum", "avg", "max", "min")


class Comm(Protocol):
    """A rank's place on a mesh, and its collectives."""

    mesh: Mesh
    rank: int

    @property
    def coords(self) -> dict[str, int]:
        """Position on every axis."""
        ...

    @property
    def arrives(self) -> bool:
        """Whether ranks get what others send; a fake process group gives each its own."""
        ...

    def all_reduce(self, tensor: torch.Tensor, axes: Sequence[str], op: str = "sum") -> torch.Tensor:
        """Combine over the ranks along the axes together; may overwrite `tensor`. op: one of `REDUCTIONS`."""
        ...

    def add(self, tensor: torch.Tensor, axes: Sequence[str]) -> None:
        """Sum in place over the ranks along the axes together; `tensor` is contiguous."""
        ...

    def all_gather(self, tensor: torch.Tensor, axes: Sequence[str]) -> list[torch.Tensor]:
        """Tensors of one shape of the ranks along the axes, in mesh order."""
        ...

    def send(self, tensor: torch.Tensor, target: int, tag: int = 0) -> None:
        """To another rank, which receives it under the same tag; does not wait."""
        ...

    def receive(self, into: torch.Tensor, source: int, tag: int = 0) -> torch.Tensor:
        """What another rank sent; `into` has its shape and dtype, and may be overwritten."""
        ...

    def prepare(self, axes: Sequence[str]) -> None:
        """Ranks will speak over these axes, and some perhaps earlier than others; a collective of all ranks."""
        ...


def members(mesh: Mesh, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
    """Ranks that differ from `rank` along the axes only, in mesh order; joint axes "dp+cp" are two."""
    names = [name for axis in axes for name in axis.split("+")]
    found = [mesh.coords(rank)]
    for name in sorted(names, key=mesh.axes.index):
        found = [{**at, name: i} for at in found for i in range(mesh.size(name))]
    return tuple(mesh.rank(at) for at in found)


class Alone:
    """One rank: everything is already everywhere."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.rank = mesh, 0

    @property
    def arrives(self) -> bool:
        """See `Comm`."""
        return True

    @property
    def coords(self) -> dict[str, int]:
        """See `Comm`."""
        return dict.fromkeys(self.mesh.axes, 0)

    def all_reduce(self, tensor: torch.Tensor, axes: Sequence[str], op: str = "sum") -> torch.Tensor:
        """See `Comm`."""
        return tensor

    def add(self, tensor: torch.Tensor, axes: Sequence[str]) -> None:
        """See `Comm`."""

    def all_gather(self, tensor: torch.Tensor, axes: Sequence[str]) -> list[torch.Tensor]:
        """See `Comm`."""
        return [tensor]

    def send(self, tensor: torch.Tensor, target: int, tag: int = 0) -> None:
        """See `Comm`; there is nobody."""
        raise OracleError("one rank has nobody to send to")

    def receive(self, into: torch.Tensor, source: int, tag: int = 0) -> torch.Tensor:
        """See `Comm`; there is nobody."""
        raise OracleError("one rank has nobody to receive from")

    def prepare(self, axes: Sequence[str]) -> None:
        """See `Comm`."""


class Processes:
    """Ranks of torch.distributed, in the order of the mesh.

    Raises:
        OracleError: the world has another size than the mesh.
    """

    def __init__(self, mesh: Mesh) -> None:
        import torch.distributed as dist

        if dist.get_world_size() != mesh.world:
            raise OracleError(f"the plan's mesh ({mesh}) has {mesh.world} ranks, the job has {dist.get_world_size()}")
        self.mesh, self.rank, self._dist = mesh, dist.get_rank(), dist
        self._groups: dict[tuple[str, ...], Any] = {}
        self._sent: list[tuple[Any, torch.Tensor]] = []  # until they have gone
        # What `all_reduce` does of a plain tensor, without the Python around it: half the time of a small sum.
        self._sum = dist.AllreduceOptions()
        self._sum.asyncOp = False
        self._reduce: Any = None  # as it was when last looked at,
        self._direct = False  # and whether it was torch's own
        named = dist.ReduceOp
        self._ops = {"sum": named.SUM, "avg": named.SUM, "max": named.MAX, "min": named.MIN}

    @property
    def arrives(self) -> bool:
        """See `Comm`."""
        return str(self._dist.get_backend()) != "fake"

    @property
    def coords(self) -> dict[str, int]:
        """See `Comm`."""
        return self.mesh.coords(self.rank)

    def all_reduce(self, tensor: torch.Tensor, axes: Sequence[str], op: str = "sum") -> torch.Tensor:
        """See `Comm`."""
        group, size = self._group(axes)
        tensor = tensor.contiguous()
        self._dist.all_reduce(tensor, self._ops[op], group)
        return tensor.div_(size) if op == "avg" else tensor

    def add(self, tensor: torch.Tensor, axes: Sequence[str]) -> None:
        """See `Comm`."""
        group, reduce = self._group(axes)[0], self._dist.all_reduce
        if reduce is not self._reduce:
            self._reduce, self._direct = reduce, torchs_own(reduce)
        if not self._direct:  # who watches or replaces it sees these sums, too
            reduce(tensor, self._ops["sum"], group)
        elif (work := group.allreduce([tensor], self._sum)) is not None:
            work.wait()

    def all_gather(self, tensor: torch.Tensor, axes: Sequence[str]) -> list[torch.Tensor]:
        """See `Comm`."""
        group, size = self._group(axes)
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(size)]
        self._dist.all_gather(parts, tensor, group=group)
        return parts

    def send(self, tensor: torch.Tensor, target: int, tag: int = 0) -> None:
        """See `Comm`."""
        self._sent = [(work, kept) for work, kept in self._sent if not work.is_completed()]
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        self._sent.append((self._dist.isend(copy, target, tag=tag), copy))

    def receive(self, into: torch.Tensor, source: int, tag: int = 0) -> torch.Tensor:
        """See `Comm`."""
        self._dist.recv(into, source, tag=tag)
        return into

    def prepare(self, axes: Sequence[str]) -> None:
        """See `Comm`."""
        self._group(axes)

    def _group(self, axes: Sequence[str]) -> tuple[Any, int]:
        """The group of this rank; all ranks make all groups of these axes at the same place of the program."""
        key = axes if type(axes) is tuple else tuple(axes)
        found: tuple[Any, int] | None = self._groups.get(key)
        if found is None:
            every = sorted({members(self.mesh, rank, axes) for rank in range(self.mesh.world)})
            made = [(ranks, self._dist.new_group(list(ranks))) for ranks in every]
            found = self._groups[key] = next((group, len(ranks)) for ranks, group in made if self.rank in ranks)
        return found


def torchs_own(function: Any) -> bool:  # Any: whatever stands there
    """Whether a function of torch is torch's, and no wrapper that somebody put in its place."""
    return type(function) is FunctionType and Path(function.__code__.co_filename).is_relative_to(Path(torch.__file__).parent)


def comm_of(mesh: Mesh) -> Comm:
    """Where this program runs: on a thread of `threads.run`, in a job of torch.distributed, or alone.

    Raises:
        OracleError: the mesh has several ranks and the program has one, or another number of them.
    """
    from proctor.oracle.parallel.threads import current

    here = current()
    if here is not None:
        return here.on(mesh)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return Processes(mesh)
    if mesh.world > 1:
        raise OracleError(
            f"the plan's mesh ({mesh}) has {mesh.world} ranks and this program is one", hint="start it under torchrun and call init_process_group, or use proctor.oracle.parallel.ranks"
        )
    return Alone(mesh)
