"""Many ranks in one process: each is a thread, collectives are meetings.

    losses = run(lambda rank: train(rank), 4)

For tests and for looking at a plan on many ranks without starting processes. torch's default generator, `torch.manual_seed`
and other globals are one for all threads: each rank of a plan draws from a generator of its own (`run`). Sums are made by
one rank in the order of the ranks, so they have the same bits in every run.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import torch

from proctor.errors import OracleError
from proctor.oracle.parallel.comm import members
from proctor.oracle.plans.mesh import Mesh

T = TypeVar("T")
_local = threading.local()
_STACK_BYTES: Final = 64 * 1024 * 1024  # autograd recurses deeper than a thread's usual stack on some systems


class _Meeting:
    """Ranks that exchange tensors; used again and again by the same ranks."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.given: list[Any] = [None] * size
        self.result: Any = None

    def exchange(self, at: int, tensor: torch.Tensor, combine: Callable[[list[torch.Tensor]], Any]) -> Any:
        """What `combine` makes of everybody's tensors, made once."""
        self.given[at] = tensor
        if self.barrier.wait() == 0:
            self.result = combine(list(self.given))
        self.barrier.wait()
        result = self.result
        self.barrier.wait()
        return result


class World:
    """What the threads of one `run` share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._lock = threading.Lock()
        self._meetings: dict[tuple[int, ...], _Meeting] = {}
        self._mail: dict[tuple[int, int, int], queue.Queue[torch.Tensor]] = {}
        self.failed = False

    def meeting(self, ranks: tuple[int, ...]) -> _Meeting:
        """Of these ranks."""
        with self._lock:
            return self._meetings.setdefault(ranks, _Meeting(len(ranks)))

    def mail(self, source: int, target: int, tag: int) -> queue.Queue[torch.Tensor]:
        """From one rank to another."""
        with self._lock:
            return self._mail.setdefault((source, target, tag), queue.Queue())

    def abort(self) -> None:
        """Nobody waits any more."""
        with self._lock:
            self.failed = True
            for meeting in self._meetings.values():
                meeting.barrier.abort()


class Thread:
    """A rank that is a thread; see `Comm`."""

    def __init__(self, world: World, rank: int, mesh: Mesh) -> None:
        self.world, self.rank, self.mesh = world, rank, mesh

    @property
    def arrives(self) -> bool:
        """See `Comm`."""
        return True

    @property
    def coords(self) -> dict[str, int]:
        """See `Comm`."""
        return self.mesh.coords(self.rank)

    def on(self, mesh: Mesh) -> Thread:
        """The same rank on a plan's mesh.

        Raises:
            OracleError: it has another number of ranks.
        """
        if mesh.world != self.world.size:
            raise OracleError(f"the plan's mesh ({mesh}) has {mesh.world} ranks, the job has {self.world.size}")
        return Thread(self.world, self.rank, mesh)

    def all_reduce(self, tensor: torch.Tensor, axes: Sequence[str], op: str = "sum") -> torch.Tensor:
        """See `Comm`."""
        return self._meet(tensor, axes, lambda parts: _combined(parts, op)).clone()

    def add(self, tensor: torch.Tensor, axes: Sequence[str]) -> None:
        """See `Comm`."""
        tensor.copy_(self._meet(tensor, axes, lambda parts: _combined(parts, "sum")))

    def all_gather(self, tensor: torch.Tensor, axes: Sequence[str]) -> list[torch.Tensor]:
        """See `Comm`."""
        parts: list[torch.Tensor] = self._meet(tensor, axes, lambda given: [part.clone() for part in given])
        return parts

    def send(self, tensor: torch.Tensor, target: int, tag: int = 0) -> None:
        """See `Comm`."""
        self.world.mail(self.rank, target, tag).put(tensor.detach().clone())

    def receive(self, into: torch.Tensor, source: int, tag: int = 0) -> torch.Tensor:
        """See `Comm`.

        Raises:
            BrokenBarrierError: the job has failed elsewhere.
        """
        while True:
            try:
                return self.world.mail(source, self.rank, tag).get(timeout=1.0)
            except queue.Empty:
                if self.world.failed:
                    raise threading.BrokenBarrierError from None

    def prepare(self, axes: Sequence[str]) -> None:
        """See `Comm`."""

    def _meet(self, tensor: torch.Tensor, axes: Sequence[str], combine: Callable[[list[torch.Tensor]], Any]) -> Any:
        ranks = members(self.mesh, self.rank, axes)
        if self.world.failed:
            raise threading.BrokenBarrierError
        return self.world.meeting(ranks).exchange(ranks.index(self.rank), tensor.detach(), combine)


def _combined(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        if op in ("sum", "avg"):
            total += part
        else:
            total = torch.maximum(total, part) if op == "max" else torch.minimum(total, part)
    return total / len(parts) if op == "avg" else total


def current() -> Thread | None:
    """The rank that this thread is; None outside `run`."""
    found: Thread | None = getattr(_local, "rank", None)
    return found


def run(function: Callable[[int], T], ranks: int) -> list[T]:
    """Call a function on as many ranks, each a thread of this process.

    Args:
        function: gets its rank.
        ranks: how many.

    Returns:
        what the ranks returned.

    Raises:
        Exception: the first rank's that failed; the others stop waiting.
    """
    world = World(ranks)
    results: list[Any] = [None] * ranks
    errors: list[tuple[int, BaseException]] = []

    def one(rank: int) -> None:
        _local.rank = Thread(world, rank, Mesh(("rank",), (ranks,)))
        try:
            results[rank] = function(rank)
        except BaseException as error:  # noqa: BLE001  # it is raised again below, in the caller's thread
            errors.append((rank, error))
            world.abort()

    before = threading.stack_size(_STACK_BYTES)
    threads = [threading.Thread(target=one, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    threading.stack_size(before)
    for thread in threads:
        thread.join()
    own = [error for _, error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        raise own[0] if own else errors[0][1]
    return results
