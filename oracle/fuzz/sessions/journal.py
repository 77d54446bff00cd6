"""A campaign's directory: what it was asked, what it did pair by pair, its findings. It can be resumed after any end.

    campaign.json            seed, libraries, rows, version of torch
    journal-<w>.jsonl        one line a pair, of worker w; a torn last line is left out
    findings/<id>/           scenario.json, script.py, output.txt
    claims/                  failures that workers look into at the moment (`search/board.py`)
    report.json report.html known.toml
    lock                     held by the campaign that runs here
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from proctor.errors import OracleError
from proctor.invariants.files import UNREADABLE, read_file
from proctor.oracle.fuzz.search.campaign import Pair
from proctor.oracle.fuzz.search.findings import Finding

FORM: Final = 1
_MOST_BYTES: Final = 16 << 20  # of a finding, and of what a campaign was asked
_MOST_JOURNAL_BYTES: Final = 1 << 30


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a campaign was asked; a resumed one goes on with it."""

    seed: int
    libraries: tuple[str, ...]
    rows: int
    workers: int
    versions: dict[str, str]
    form: int = FORM
    models: tuple[str, ...] = ()  # names of templates; empty for all
    python: str = ""  # the interpreter that has the library, where it is not this one
    axes: tuple[str, ...] = ()  # that every setting is drawn around, "axis" or "axis=value"; empty for all


class Journal:
    """The directory of a campaign."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, asked: Asked) -> None:
        """Start a new one.

        Raises:
            OracleError: there is a campaign already, or the place cannot be written.
        """
        if (self.path / "campaign.json").exists():
            raise OracleError(f"{self.path}: there is a campaign already", hint=f"--resume {self.path}, or another -o")
        with told(self.path):
            (self.path / "findings").mkdir(parents=True, exist_ok=True)
            (self.path / "campaign.json").write_bytes(msgspec.json.format(msgspec.json.encode(asked)))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other campaigns out of the directory; ends with the process at the latest, however that ends.

        Raises:
            OracleError: one is running here.
        """
        with told(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / "lock").open("ab")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OracleError(f"{self.path}: a campaign is running here", hint="wait for it, or give another -o") from None
            except OSError:  # a file system without locks
                pass
            yield

    def asked(self) -> Asked:
        """What it was asked.

        Raises:
            OracleError: it is no campaign's directory.
        """
        try:
            asked = msgspec.json.decode(read_file(self.path / "campaign.json", _MOST_BYTES), type=Asked)
        except (OSError, *UNREADABLE) as e:
            raise OracleError(f"{self.path}: no campaign: {e}", hint="give the -o of a campaign") from None
        if asked.form != FORM:
            raise OracleError(f"{self.path}: a campaign of form {asked.form}, this Proctor reads {FORM}")
        return asked

    def add(self, worker: int, pair: Pair) -> None:
        """Write a pair down."""
        with told(self.path), (self.path / f"journal-{worker}.jsonl").open("a+b") as file:
            torn = b""
            if file.tell():
                file.seek(-1, os.SEEK_END)
                torn = b"" if file.read(1) == b"\n" else b"\n"  # a kill left half a line: it stays a line of its own
            file.write(torn + msgspec.json.encode(pair) + b"\n")

    def pairs(self) -> Iterator[tuple[int, Pair]]:
        """Worker and pair of every line that is whole."""
        decoder = msgspec.json.Decoder(Pair)
        for file in sorted(self.path.glob("journal-*.jsonl")):
            number = file.stem.partition("-")[2]
            if not (number.isascii() and number.isdecimal()):
                continue  # not ours
            try:
                lines = read_file(file, _MOST_JOURNAL_BYTES).splitlines()
            except OSError as e:
                raise OracleError(f"{file}: {e.strerror or e}", hint="move it away, then --resume") from None
            for line in lines:
                try:
                    yield int(number), decoder.decode(line)
                except UNREADABLE:
                    continue  # torn by a kill

    def put(self, finding: Finding, script: str, output: str) -> Path:
        """Write a finding down; returns its script's path."""
        folder = self.path / "findings" / finding.id
        with told(self.path):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "script.py").write_text(script)
            (folder / "output.txt").write_text(output)
            part = folder / f"scenario.{os.getpid()}.part"  # other workers read it
            part.write_bytes(msgspec.json.format(msgspec.json.encode(finding)))
            part.replace(folder / "scenario.json")
        return folder / "script.py"

    def findings(self) -> list[Finding]:
        """Every finding that was written down whole."""
        found = []
        for file in sorted((self.path / "findings").glob("*/scenario.json")):
            try:
                found.append(msgspec.json.decode(read_file(file, _MOST_BYTES), type=Finding))
            except (OSError, *UNREADABLE):
                continue
        return found

    def write(self, name: str, text: Callable[[], str]) -> None:
        """Write a report."""
        with told(self.path):
            (self.path / name).write_text(text())


def is_full(error: OSError) -> bool:
    """Whether something could not be written since there is no room."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def told(path: Path) -> Iterator[None]:
    """Say in one line that something cannot be written."""
    try:
        yield
    except OSError as e:
        full = is_full(e)
        hint = f"make room, then --resume {path}" if full else "give another -o"
        raise OracleError(f"{e.filename or path}: {'the disk is full' if full else e.strerror or e}", hint=hint) from None
