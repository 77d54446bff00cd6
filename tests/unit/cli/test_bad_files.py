"""Whatever lies where a file is expected: exit 2, one line, at once, and no traceback; never taken as nothing."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.processes import process
from helpers.runs import write_run
from helpers.system.rights import bound_to_permissions

from proctor.cli import main
from proctor.invariants.pack import Pack, write_pack

DEEP = b"[" * 200_000
Make = Callable[[Path], None]


def _big(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(5 << 30)  # sparse


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's name is short
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


def _bytes(content: bytes) -> Make:
    return lambda path: path.write_bytes(content) and None


BAD: dict[str, Make] = {
    "missing": lambda path: None,
    "fifo": lambda path: os.mkfifo(path),
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "null": lambda path: path.symlink_to("/dev/null"),
    "folder": lambda path: path.mkdir(),
    "socket": _socket,
    "loop": lambda path: path.symlink_to(path.name),
    "big": _big,
    "empty": _bytes(b""),
    "no-utf8": _bytes(b'{"schema": "\xff\xfe"}'),
    "deep": _bytes(DEEP),
    "deep-objects": _bytes(b'{"a":' * 200_000),
    "zeros": _bytes(bytes(4096)),
    "half": _bytes(b'{"schema": 1, "'),
    "list": _bytes(b"[1, 2, 3]"),
    "number": _bytes(b"7"),
    "huge-number": _bytes(b'{"schema": 1' + b"0" * 5000 + b"}"),
    "other-shape": _bytes(b'{"schema": "one", "known": {}, "suppress": 3, "invariants": 4}'),
    "forbidden": lambda path: path.touch(0),
    "other-keys": _bytes(b'{"supress": [], "knwon": []}'),
}
ROLES = ("pack", "suppressions.json", "suppressions.toml", "baseline", "run.json", "calls.arrow", "names.arrow", "plan.toml", "plan.json",
         "page.toml", "rules", "capsule", "proof", "known", "scenario", "campaign", "project", "record", "blind")  # fmt: skip
FINE = {("suppressions.toml", "empty"), ("page.toml", "empty"), ("calls.arrow", "empty"), ("names.arrow", "empty"),
        ("calls.arrow", "missing"), ("names.arrow", "missing"), ("plan.toml", "empty"), ("known", "empty"), ("project", "empty"), ("project", "missing"),
        ("project", "null"), ("blind", "missing")}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", [process()])


def command(role: str, run: Path, bad: Path) -> tuple[list[str], Path]:
    """A command that reads the file, and where the file must lie."""
    check = ["check", str(run)]
    if role == "pack":
        return [*check, "-i", str(bad)], bad
    if role.startswith("suppressions"):
        named = bad.with_name(role)
        return [*check, "--suppressions", str(named)], named
    if role == "baseline":
        return [*check, "--baseline", str(bad)], bad
    if role == "run.json":
        return check, run / "run.json"
    if role.endswith(".arrow"):
        return check, next((run / "procs").iterdir()) / role
    if role.startswith("plan"):
        named = bad.with_name(role)
        return ["oracle", "plan", str(named)], named
    if role == "page.toml":
        return ["page", "test", "--config", str(bad)], bad
    if role == "rules":
        return ["import", "traincheck-invariants", str(bad), "-o", str(bad.with_name("out.json"))], bad
    if role == "proof":
        return ["oracle", "prove", "--check", str(bad)], bad
    if role == "known":
        return ["oracle", "fuzz", "--known", str(bad), "--pairs", "1", "-o", str(bad.with_name("campaign"))], bad
    if role == "scenario":
        return ["oracle", "fuzz", "replay", str(bad)], bad
    if role == "campaign":
        return ["oracle", "fuzz", "--resume", str(bad.parent)], bad.with_name("campaign.json")
    if role == "project":
        os.chdir(bad.parent)
        return check, bad.with_name("proctor.toml")
    if role == "record":
        own = bad.with_name("pack.json")
        write_pack(Pack([]), own)
        return ["pack", "stamp", str(own), "--record", str(bad)], bad
    if role == "blind":
        return check, next((run / "procs").iterdir()) / "blind"
    return ["capsule", "show", str(bad.parent / "capsule")], bad.parent / "capsule" / "capsule.json"


def cases() -> Iterator[tuple[str, str]]:
    for role in ROLES:
        for kind in BAD:
            if (role, kind) not in FINE:
                yield role, kind


def test_there_are_at_least_200_of_them() -> None:
    assert len(list(cases())) >= 200


@pytest.mark.parametrize("role", ROLES)
def test_a_bad_file_is_one_line_and_exit_2(role: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong, here = [], Path.cwd()
    for kind in [kind for r, kind in cases() if r == role]:
        place = tmp_path / kind
        place.mkdir()
        arguments, path = command(role, write_run(place / "run", [process()]), place / "bad")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        BAD[kind](path)
        began = time.process_time()
        with bound_to_permissions():
            code = main(arguments)
        os.chdir(here)  # where `proctor.toml` is read
        spent = time.process_time() - began
        said = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
        if code not in (2, 3) or (code == 2 and len(said) != 1) or spent > 30 or "Traceback" in "".join(said):
            wrong.append((kind, code, round(spent, 1), said[:2]))
    assert wrong == []


def test_a_file_that_says_nothing_is_no_suppression(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"suppress": []}))
    assert main(["check", str(run), "--suppressions", str(path)]) in (0, 3)
