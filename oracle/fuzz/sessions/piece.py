"""A piece of a campaign that runs on many machines, in a process of its own: `python -m proctor.oracle.fuzz.sessions.piece FOLDER`.

Ranks are forked from a process that has no threads, and a worker of a cluster has many; so `relay.py` starts this one. It reads FOLDER/piece.json, and FOLDER
becomes the directory of a small campaign: a journal, findings, claims. 0 it is done, 130 it was interrupted, else one line on stderr says why.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

import proctor
from proctor.errors import OracleError, ProctorError
from proctor.oracle.fuzz.search.campaign import Pair
from proctor.oracle.fuzz.search.findings import Finding, Known
from proctor.oracle.fuzz.sessions.journal import Asked
from proctor.oracle.fuzz.space import Point

FILE: Final = "piece.json"


class Piece(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is asked of a worker.

    Attributes:
        asked: of the campaign.
        numbers: of its pairs; it runs as many as it has time for.
        seconds: that it has, after everything is imported.
        timeout_s: of one scenario.
        known: findings that are known.
        findings: of the campaign so far.
        held: settings that the campaign drew last.
        proctor: version.
    """

    asked: Asked
    numbers: tuple[int, ...]
    seconds: float
    timeout_s: float
    known: tuple[Known, ...] = ()
    findings: tuple[Finding, ...] = ()
    held: tuple[Point, ...] = ()
    proctor: str = proctor.__version__


class Carried(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A finding on its way to who asked, and what its script printed. The script is written there again, from the finding."""

    finding: Finding
    output: str = ""


class Told(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a piece says while it runs, and at its end all of it once more.

    Attributes:
        piece: its number.
        pairs, findings: of it; in between those that are new.
        claims: symptoms that it looks into now.
        ended: None while it runs; "" when all is well, "interrupted", or why it ended.
    """

    piece: int
    pairs: tuple[Pair, ...] = ()
    findings: tuple[Carried, ...] = ()
    claims: tuple[str, ...] = ()
    ended: str | None = None


def main(folder: Path) -> int:
    """Run the piece that lies in a folder."""
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM)  # it goes with the worker that asked
    signal.signal(signal.SIGINT, signal.default_int_handler)  # workers are started without
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if os.getppid() != parent:
        return 143
    from proctor.oracle.fuzz.running.warm import modules_of, warm_up
    from proctor.oracle.fuzz.search.board import Board
    from proctor.oracle.fuzz.sessions.journal import Journal
    from proctor.oracle.fuzz.sessions.session import Share, versions, worked

    piece = msgspec.json.decode((folder / FILE).read_bytes(), type=Piece)
    here = {**versions(piece.asked.libraries, piece.asked.python), "proctor": proctor.__version__}
    if here != {**piece.asked.versions, "proctor": piece.proctor}:
        raise OracleError(f"the campaign is of {piece.asked.versions} and Proctor {piece.proctor}, here is {here}")
    if "keras" not in piece.asked.libraries:
        warm_up(modules_of(piece.asked.libraries))
    share = Share(
        Journal(folder), piece.asked, list(piece.known), piece.timeout_s, time.monotonic() + piece.seconds, piece.held, board=Board(folder, "here"), given=piece.findings,
    )
    return 130 if worked(share, piece.numbers, lambda _: None) else 0


if __name__ == "__main__":
    try:
        code = main(Path(sys.argv[1]))
    except KeyboardInterrupt:
        code = 130
    except ProctorError as error:
        print(error, file=sys.stderr)
        code = error.exit_code
    sys.exit(code)
