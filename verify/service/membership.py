"""Who of a job is there, and what belongs to a life of the job that is over.

A job that is started again, by hand or by an elastic launcher whose rank died, counts steps from 0. Its records must not
be judged together with those of its earlier life, of which connections break some seconds late.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from proctor.verify.transport.inbox import Joined, Left


@dataclass
class Peer:
    """One process. `heard` is when it said something last, in the seconds of the roll's clock."""

    host: str = ""
    pid: int = -1
    rank: int = -1
    world: int = 1
    heard: float = 0.0
    gone: bool = False
    cut: bool = False  # gone without a word, and perhaps not over
    said_bye: bool = False

    def tell(self, info: Mapping[str, Any]) -> None:
        """Its `process.json` is this."""
        self.rank = _number(info.get("rank"), self.rank)
        self.world = _number(info.get("world"), self.world)
        self.pid = _number(info.get("pid"), self.pid)

    def ended(self) -> bool:
        """Whether it is gone, also when its connection has not been given up yet; not known of other hosts."""
        here = self.host == platform.node() and self.pid > 0
        return self.gone or (here and not os.path.exists(f"/proc/{self.pid}"))


class Roll:
    """The processes of the job's present life.

    Args:
        clock: seconds that never jump.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.peers: dict[str, Peer] = {}
        self.lives = 1
        self._clock = clock
        self._over: set[str] = set()

    @property
    def here(self) -> list[str]:
        """Names of those that are there."""
        return [name for name, peer in self.peers.items() if not peer.gone]

    @property
    def deserted(self) -> bool:
        """There were some, and all are gone."""
        return bool(self.peers) and not self.here

    @property
    def finished(self) -> bool:
        """There were some, and all said goodbye."""
        return bool(self.peers) and all(peer.gone and peer.said_bye for peer in self.peers.values())

    @property
    def heard(self) -> dict[int, float]:
        """When each rank that is there, or of which nothing is heard any more, was heard last."""
        return {p.rank: p.heard for p in self.peers.values() if (p.cut or not p.gone) and p.rank >= 0}

    def local(self) -> dict[str, int]:
        """Ids of the processes of this host that are there."""
        return {name: p.pid for name, p in self.peers.items() if p.host == platform.node() and p.pid > 0 and not p.gone}

    def lost(self, process: str) -> int | None:
        """The rank of a process of this life of the job that did not say goodbye; `None` for any other."""
        peer = self.peers.get(process)
        return peer.rank if peer is not None and peer.rank >= 0 and not peer.said_bye else None

    def signed(self, process: str, at: float) -> None:
        """A process gave a sign of life."""
        peer = self.peers.get(process)
        if peer is not None:
            peer.heard = max(peer.heard, at)

    def missing(self, world: int) -> Collection[int]:
        """Ranks that have not come."""
        came = {p.rank for p in self.peers.values()}
        return [rank for rank in range(min(world, 1 << 16)) if rank not in came]

    def hear(self, process: str) -> Peer | None:
        """Something came from a process; `None`: of an earlier life of the job, so that it does not count."""
        if process in self._over:
            return None
        peer = self.peers.setdefault(process, Peer())
        peer.heard = self._clock()
        return peer

    def begins(self, event: Joined) -> bool:
        """Whether this process is the first of a new life of the job: nobody is there, or somebody else has its rank."""
        if event.process in self.peers or event.process in self._over or not self.peers:
            return False
        new = Peer()
        new.tell(event.info)
        taken = new.world > 1 and any(p.rank == new.rank and p.world > 1 for p in self.peers.values())
        return taken or all(peer.ended() for peer in self.peers.values())

    def begin(self) -> None:
        """The job was started again: who is on the roll belongs to its earlier life."""
        self._over |= self.peers.keys()
        self.peers = {}
        self.lives += 1

    def join(self, event: Joined) -> None:
        """A process that counts says hello."""
        peer = self.peers.setdefault(event.process, Peer())
        peer.host = event.host
        peer.tell(event.info)
        peer.gone = peer.said_bye = peer.cut = False

    def leave(self, event: Left) -> None:
        """A process that counts is gone."""
        peer = self.peers[event.process]
        peer.gone, peer.said_bye, peer.cut = True, event.how == "bye", event.how == "timeout"


def _number(said: Any, default: int) -> int:
    return said if isinstance(said, int) and not isinstance(said, bool) else default
