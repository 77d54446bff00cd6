"""One peer of an endpoint, and what a peer may do."""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass

from proctor.invariants.wire import frames
from proctor.invariants.wire.frames import Decoder


@dataclass(frozen=True)
class Limits:
    """What a peer may do.

    handshake_s: to prove itself. silent_s: without a byte. frame_s: from the first byte of a frame to its last.
    out_bytes: that wait for a peer which does not read.
    """

    connections: int = 8192
    handshake_s: float = 5.0
    silent_s: float = 30.0
    frame_s: float = 30.0
    ping_s: float = 5.0
    out_bytes: int = 4 << 20


class Connection:
    """One peer. Used by the endpoint's thread only."""

    def __init__(self, sock: socket.socket, local: bool, now: float) -> None:
        self.socket, self.local = sock, local
        self.role = ""  # until it has proved itself
        self.decoder = Decoder(frames.HANDSHAKE_OBJECT, 0)
        self.challenge = secrets.token_bytes(32)
        self.out = bytearray()
        self.opened = self.heard = now
        self.begun: float | None = None  # a frame that is not whole
        self.pinged = 0.0
        self.expected: dict[int, int] = {}  # number of the next frame of a channel
        self.numbers: dict[int, int] = {}
        self.closed = False
        self.writing = False
        self.deaf = False  # takes nothing more; what it said before that is still read
