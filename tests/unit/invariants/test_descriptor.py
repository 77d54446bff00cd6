"""A number that we remember is used only while the file behind it is ours."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from proctor.invariants.descriptor import Bell, Descriptor, OwnSocket, identity
from proctor.invariants.files import replace_file
from proctor.invariants.wire import peer
from proctor.invariants.wire.peer import parse_address


def take(number: int, path: Path) -> int:
    """What a program does that closes all descriptors and opens a file."""
    os.close(number)
    theirs = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    if theirs != number:
        os.dup2(theirs, number)
        os.close(theirs)
    return number


def test_a_file_whose_number_was_taken_is_opened_again(tmp_path: Path) -> None:
    ours = Descriptor(tmp_path / "ours", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    ours.write(b"one", 0)
    number = take(ours.number(), tmp_path / "theirs")
    ours.write(b"two", 3)
    assert (tmp_path / "ours").read_bytes() == b"onetwo"
    assert (tmp_path / "theirs").read_bytes() == b""
    ours.close()
    assert identity(number) is not None  # theirs is open still
    os.close(number)


def test_closing_leaves_a_number_alone_that_is_not_ours(tmp_path: Path) -> None:
    ours = Descriptor(tmp_path / "ours", os.O_WRONLY | os.O_CREAT)
    number = take(ours.number(), tmp_path / "theirs")
    ours.close()
    os.write(number, b"whole")
    os.close(number)
    assert (tmp_path / "theirs").read_bytes() == b"whole"


def test_a_file_that_cannot_be_had_back_is_an_error(tmp_path: Path) -> None:
    ours = Descriptor(tmp_path / "ours", os.O_WRONLY | os.O_CREAT)
    number = take(ours.number(), tmp_path / "theirs")
    os.link(tmp_path / "ours", tmp_path / "moved")
    (tmp_path / "theirs").rename(tmp_path / "ours")  # another file at our path
    kept = os.open(tmp_path / "kept", os.O_RDWR | os.O_CREAT)
    os.dup2(kept, number)
    with pytest.raises(OSError, match="another file is in its place"):
        ours.write(b"x", 0)
    assert (tmp_path / "ours").read_bytes() == b"" == (tmp_path / "kept").read_bytes()
    os.close(kept)
    os.close(number)


def test_descriptors_lie_where_the_system_gives_none_out(tmp_path: Path) -> None:
    ours = Descriptor(tmp_path / "ours", os.O_WRONLY | os.O_CREAT)
    with socket.socket() as plain, OwnSocket(socket.AF_INET) as own:
        assert ours.number() >= 128
        assert own.fileno() >= 128
        assert plain.fileno() < 128
        assert not os.get_inheritable(own.fileno())
    ours.close()


def test_a_socket_whose_number_was_taken_says_nothing_there(tmp_path: Path) -> None:
    ours = OwnSocket(socket.AF_UNIX)
    number = take(ours.fileno(), tmp_path / "theirs")
    flags = os.get_blocking(number)
    for use in (lambda: ours.send(b"x"), lambda: ours.sendall(b"x"), lambda: ours.recv(1), lambda: ours.settimeout(1.0)):
        with pytest.raises(ConnectionResetError):
            use()
    ours.close()
    assert os.get_blocking(number) == flags
    assert identity(number) is not None
    os.close(number)
    assert (tmp_path / "theirs").read_bytes() == b""


def test_the_bell_rings_again_after_its_pipe_was_taken(tmp_path: Path) -> None:
    bell = Bell()
    numbers = [take(n, tmp_path / f"theirs{n}") for n in bell._ends]
    bell.ring()
    bell.clear()
    waited = bell.fileno()
    assert waited not in numbers
    bell.ring()
    assert os.read(waited, 8) == b"\0"
    bell.close()
    for number in numbers:
        os.close(number)
        assert (tmp_path / f"theirs{number}").read_bytes() == b""


def test_tcp_addresses_are_tried_in_turn() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with peer.connect(parse_address(f"tcp:localhost:{port}"), 2.0) as sock:
            assert isinstance(sock, OwnSocket)
    with pytest.raises(OSError, match="refused"):
        peer.connect(parse_address(f"tcp:127.0.0.1:{port}"), 2.0)


def test_a_small_limit_still_leaves_files_that_open(tmp_path: Path) -> None:
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, limits[1]))
        replace_file(tmp_path / "f", b"content")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert (tmp_path / "f").read_bytes() == b"content"
