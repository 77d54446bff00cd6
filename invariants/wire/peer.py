"""Who talks to whom: addresses, the token of a job, and the handshake that proves it on both sides.

`unix:PATH` on one host: the socket lies in a folder of mode 0700 and the peer's user is asked of the kernel.
`tcp:HOST:PORT` between hosts (`tcp:[::1]:PORT` for IPv6). Both sides prove with HMAC-SHA256 over fresh nonces that they know
the token, which never crosses the wire. What follows is neither encrypted nor signed: between hosts that do not trust their
network, put a tunnel around it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from proctor.errors import TransportError
from proctor.invariants.descriptor import OwnSocket, opened
from proctor.invariants.files import replace_file
from proctor.invariants.wire import frames
from proctor.invariants.wire.frames import Accepted, Challenge, Decoder, Frame, FrameError, Proof

MAX_UNIX_PATH: Final = 107  # bytes of sockaddr_un.sun_path
MIN_TOKEN: Final = 16  # bytes
_MAX_TOKEN_FILE: Final = 4096


class Address(msgspec.Struct, frozen=True):
    """Where a verifier listens: a path, or a host and a port."""

    path: str = ""
    host: str = ""
    port: int = 0

    @property
    def local(self) -> bool:
        return bool(self.path)

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"tcp:[{self.host}]:{self.port}" if ":" in self.host else f"tcp:{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """`unix:PATH` or `tcp:HOST:PORT`.

    Raises:
        TransportError: it is neither.
    """
    scheme, _, rest = text.partition(":")
    if scheme == "unix" and rest and "\0" not in rest:
        return Address(path=os.path.abspath(rest))
    host, _, port = rest.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if scheme == "tcp" and host and port.isascii() and port.isdigit() and int(port) < 1 << 16:
        return Address(host=host, port=int(port))
    raise TransportError(f"{text!r} is not an address", hint="unix:/path/to/socket or tcp:host:port")


# -- the token ----------------------------------------------------------------------------------------------------


def make_token(path: Path) -> bytes:
    """Write a new token that only its owner can read; a file that is there is replaced.

    Raises:
        TransportError: it cannot be written.
    """
    token = secrets.token_hex(32).encode()
    try:
        replace_file(path, token + b"\n", mode=0o600)
    except OSError as e:
        raise TransportError(f"{path}: cannot be written: {e.strerror or e}") from None
    return token


def read_token(path: Path) -> bytes:
    """The token in a file.

    Raises:
        TransportError: it cannot be read, others could read it too, or it is too short to be one.
    """
    try:
        with opened(path, os.O_RDONLY | os.O_NONBLOCK) as file:
            mode = os.fstat(file.number()).st_mode
            data = os.read(file.number(), _MAX_TOKEN_FILE + 1).strip() if stat.S_ISREG(mode) else b""
    except OSError as e:
        raise TransportError(f"{path}: {e.strerror or e}") from None
    if not stat.S_ISREG(mode) or mode & 0o077:
        raise TransportError(f"{path}: others can read the token", hint=f"chmod 600 {path}")
    if not MIN_TOKEN <= len(data) <= _MAX_TOKEN_FILE:
        raise TransportError(f"{path}: a token has {MIN_TOKEN} to {_MAX_TOKEN_FILE} bytes, this one {len(data)}")
    return data


def peer_proof(token: bytes, challenge: bytes, nonce: bytes, role: str) -> bytes:
    """What a peer answers to the verifier's challenge."""
    return hmac.digest(token, b"proctor peer\0" + role.encode() + b"\0" + challenge + nonce, hashlib.sha256)


def verifier_proof(token: bytes, nonce: bytes, challenge: bytes) -> bytes:
    """What the verifier answers to the peer's nonce."""
    return hmac.digest(token, b"proctor verifier\0" + nonce + challenge, hashlib.sha256)


def proves(token: bytes, challenge: bytes, proof: Proof) -> bool:
    """Whether a peer knows the token."""
    return hmac.compare_digest(peer_proof(token, challenge, proof.nonce, proof.role), proof.proof)


# -- sockets ------------------------------------------------------------------------------------------------------


def same_user(sock: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket runs as this user, or as root."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return uid in (os.geteuid(), 0)


@contextlib.contextmanager
def _short(path: str) -> Iterator[str]:
    """A name for a socket that fits into 107 bytes: through a descriptor of its folder when its own does not."""
    if len(os.fsencode(path)) <= MAX_UNIX_PATH:
        yield path
        return
    folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{os.path.basename(path)}"
    finally:
        os.close(folder)


def connect(address: Address, timeout_s: float) -> OwnSocket:
    """A connected socket with this timeout.

    Raises:
        OSError: nobody listens there, or not in time.
        TransportError: the one who listens is another user.
    """
    if not address.local:
        return _connect_tcp(address, timeout_s)
    sock = OwnSocket(socket.AF_UNIX)
    try:
        sock.settimeout(timeout_s)
        with _short(address.path) as path:
            sock.connect(path)
        if not same_user(sock):
            raise TransportError(f"{address}: another user listens there")
    except BaseException:
        sock.close()
        raise
    return sock


def _connect_tcp(address: Address, timeout_s: float) -> OwnSocket:
    """Try the host's addresses in turn, as `socket.create_connection` does."""
    failed = OSError(f"{address}: no address")
    for family, kind, protocol, _, where in socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM):
        sock = OwnSocket(family, kind, protocol)
        try:
            sock.settimeout(timeout_s)
            sock.connect(where)
            tune(sock)
        except OSError as e:
            sock.close()
            failed = e
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failed


def tune(sock: socket.socket) -> None:
    """A TCP socket whose small frames leave at once, and that notices a peer that is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def listen(address: Address, backlog: int = 4096) -> socket.socket:
    """A listening socket. For a Unix address: its folder is made, or must be ours alone; what a dead verifier left is removed.

    Raises:
        TransportError: somebody listens there already, the folder is open to others, or the system says no.
    """
    try:
        if not address.local:
            family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
            return socket.create_server((address.host, address.port), family=family, backlog=backlog)
        _own_folder(Path(address.path).parent)
        _remove_dead(address)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _short(address.path) as path:
                sock.bind(path)
            os.chmod(address.path, 0o600)
            sock.listen(backlog)
        except BaseException:
            sock.close()
            raise
        return sock
    except OSError as e:
        raise TransportError(f"{address}: cannot listen: {e.strerror or e}") from None


def _own_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    seen = folder.stat()
    if seen.st_uid != os.geteuid() or seen.st_mode & 0o077:
        raise TransportError(f"{folder}: a socket's folder must be its owner's alone", hint=f"chmod 700 {folder}")


def _remove_dead(address: Address) -> None:
    path = Path(address.path)
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise TransportError(f"{path}: exists and is no socket")
    try:
        connect(address, 1.0).close()
    except ConnectionRefusedError:
        path.unlink(missing_ok=True)
    except OSError as e:
        raise TransportError(f"{address}: {e.strerror or e}") from None
    else:
        raise TransportError(f"{address}: a verifier listens there already")


# -- the handshake, from the side that connects ---------------------------------------------------------------------


def prove(
    sock: socket.socket, token: bytes, role: str, timeout_s: float, now: Callable[[], float] = time.monotonic
) -> Decoder:
    """Prove to a verifier that we know the token, and have it prove the same; blocks up to `timeout_s`.

    Returns:
        the decoder for what follows, which may hold bytes already.

    Raises:
        OSError: the connection broke or took too long.
        FrameError: the other side is no verifier of this job.
    """
    until = now() + timeout_s
    decoder = Decoder(frames.HANDSHAKE_OBJECT, 0)
    challenge = _await(sock, decoder, until, now).message()
    if not isinstance(challenge, Challenge):
        raise FrameError("no challenge")
    nonce = secrets.token_bytes(32)
    proof = Proof(nonce, peer_proof(token, challenge.nonce, nonce, role), role)
    sock.sendall(frames.encode(proof), socket.MSG_NOSIGNAL)
    answer = _await(sock, decoder, until, now).message()
    if not isinstance(answer, Accepted):
        raise FrameError("not accepted")
    if not hmac.compare_digest(answer.proof, verifier_proof(token, nonce, challenge.nonce)):
        raise FrameError("wrong token", "the verifier does not know the token of this job")
    decoder.allow()
    return decoder


def _await(sock: socket.socket, decoder: Decoder, until: float, now: Callable[[], float]) -> Frame:
    while (frame := decoder.next()) is None:
        sock.settimeout(max(0.001, until - now()))
        data = sock.recv(4096)
        if not data:
            raise ConnectionResetError("the verifier closed the connection")
        decoder.put(data)
        if now() >= until:
            raise TimeoutError("the verifier does not answer")
    return frame
