"""Within a worker of a dask cluster: starts the process of a piece, and carries files between its folder and who asked.

`run_piece` is the task. `deliver` is called on the worker's event loop while the task runs; it only leaves news where the task finds them. What goes over the wire is text: JSON of
`Piece` on the way here and of `Told` on the way back. (That the task and its two arguments are sent at all is dask's own work.)
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from proctor.errors import OracleError
from proctor.oracle.fuzz.running.worlds import PREFIX, swept
from proctor.oracle.fuzz.search.board import CLAIMS
from proctor.oracle.fuzz.search.findings import Finding
from proctor.oracle.fuzz.sessions.journal import Journal, is_full
from proctor.oracle.fuzz.sessions.piece import FILE, Carried, Piece, Told
from proctor.oracle.fuzz.spec import decode, encode

LOOK_S: Final = 0.5
LATE_S: Final = 600.0  # that a piece may take beyond its time: it confirms what it found last
END_S: Final = 20.0  # that it has to end once it is asked to
ELSEWHERE: Final = "elsewhere"  # what is in the file of a claim that another piece made
_ID: Final = re.compile(r"[0-9a-f]{8}")
_MOST_OUTPUT: Final = 10_000
_ROOM: Final = 1 << 20


class News(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a piece is told while it runs.

    Attributes:
        claims: symptom → piece that looks into it, of the whole campaign.
        findings: of others, that are new.
        stop: to end.
    """

    claims: dict[str, int] = {}
    findings: tuple[Finding, ...] = ()
    stop: bool = False


@dataclass
class Mail:
    """What came for the pieces of a campaign."""

    claims: dict[str, int] = field(default_factory=dict)
    findings: dict[str, Finding] = field(default_factory=dict)
    stop: bool = False


_mail: dict[str, Mail] = {}  # of this worker, by campaign


def deliver(campaign: str, text: str) -> None:
    """Leave news for the pieces of a campaign that run here, or will."""
    news = msgspec.json.decode(text, type=News)
    mail = _mail.setdefault(campaign, Mail())
    mail.claims = dict(news.claims)
    mail.findings.update({f.id: checked(f) for f in news.findings})
    mail.stop |= news.stop


def checked(finding: Finding) -> Finding:
    """A finding that came over the wire.

    Raises:
        OracleError: its name is no name, or its scenarios lie outside our own spaces. Source text is made of them.
    """
    if not _ID.fullmatch(finding.id):
        raise OracleError(f"{finding.id[:40]!r} is no finding")
    for scenario in (finding.scenario, finding.found):
        decode(encode(scenario), f"finding {finding.id}")
    return finding


def run_piece(campaign: str, number: int, text: str) -> str:
    """The task: run a piece and give its `Told` as JSON.

    Args:
        campaign: its name on the cluster, under which pieces say what they have.
        number: of the piece.
        text: JSON of the `Piece`.
    """
    from dask.distributed import get_worker

    worker = get_worker()
    swept(Path(tempfile.gettempdir()))  # what workers that were killed have left
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-piece-"))
    try:
        relay = Relay(folder, number, _mail.setdefault(campaign, Mail()), lambda told: worker.log_event(campaign, told))
        return relay.run(msgspec.json.decode(text, type=Piece))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Relay:
    """One piece: its process and its folder.

    Args:
        folder: for it.
        number: of the piece.
        mail: what comes for it.
        say: takes the JSON of a `Told` while it runs.
        command: that runs a folder's piece.
    """

    def __init__(self, folder: Path, number: int, mail: Mail, say: Callable[[str], Any], command: tuple[str, ...] = (sys.executable, "-m", "proctor.oracle.fuzz.sessions.piece")) -> None:
        self._folder, self._number, self._mail, self._say, self._command = folder, number, mail, say, command
        self._journal = Journal(folder)
        self._foreign: set[str] = set()  # findings that came from elsewhere
        self._said: dict[str, Carried] = {}
        self._pairs = 0
        self._claims: tuple[str, ...] = ()

    def run(self, piece: Piece) -> str:
        """From start to end; gives all that came of it."""
        (self._folder / CLAIMS).mkdir()
        (self._folder / FILE).write_bytes(msgspec.json.encode(piece))
        self._foreign = {f.id for f in piece.findings}
        end = time.monotonic() + piece.seconds + LATE_S
        with (self._folder / "stderr").open("wb") as errors:
            process = subprocess.Popen(
                [*self._command, str(self._folder)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True, cwd=self._folder,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        try:
            while process.poll() is None and time.monotonic() < end:
                self._take()
                self._tell()
                if self._mail.stop:
                    process.send_signal(signal.SIGINT)
                    end = min(end, time.monotonic() + END_S)
                    process.wait(max(0.0, end - time.monotonic()))
                time.sleep(LOOK_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            ended = self._ended(process)
        return self._whole(ended)

    def _take(self) -> None:
        """Put what others have into the folder."""
        for finding in [f for f in list(self._mail.findings.values()) if f.id not in self._foreign and f.id not in self._said]:
            self._foreign.add(finding.id)
            self._journal.put(finding, "", "")
        theirs = {key for key, number in self._mail.claims.items() if number != self._number}
        for file in (self._folder / CLAIMS).iterdir():
            with suppress(OSError):
                if file.name not in theirs and file.read_text() == ELSEWHERE:
                    file.unlink()
        for key in theirs:
            with suppress(OSError), (self._folder / CLAIMS / Path(key).name).open("x") as file_:
                file_.write(ELSEWHERE)

    def _tell(self) -> None:
        """Say what is new."""
        pairs = [p for _, p in self._journal.pairs()]
        findings = [c for c in self._findings() if self._said.get(c.finding.id) != c]
        claims = self._own_claims()
        if len(pairs) > self._pairs or findings or claims != self._claims:
            self._say(_text(Told(self._number, tuple(pairs[self._pairs :]), tuple(findings), claims)))
            self._pairs, self._claims = len(pairs), claims
            self._said.update({c.finding.id: c for c in findings})

    def _own_claims(self) -> tuple[str, ...]:
        found = []
        for file in sorted((self._folder / CLAIMS).iterdir()):
            with suppress(OSError):
                if file.read_text() not in ("", ELSEWHERE):
                    found.append(file.name)
        return tuple(found)

    def _findings(self) -> list[Carried]:
        return [Carried(f, self._output(f.id)) for f in self._journal.findings() if f.id not in self._foreign]

    def _output(self, id_: str) -> str:
        file = self._folder / "findings" / id_ / "output.txt"
        return file.read_text(errors="replace")[-_MOST_OUTPUT:] if file.exists() else ""

    def _whole(self, ended: str) -> str:
        return _text(Told(self._number, tuple(p for _, p in self._journal.pairs()), tuple(self._findings()), (), ended))

    def _ended(self, process: subprocess.Popen[bytes]) -> str:
        """See that it is gone; why it ended."""
        late = process.poll() is None
        if late:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)  # with what it started; ranks have groups of their own and die with it
        code = process.wait()
        if self._mail.stop or code == 130:
            return "interrupted"
        if late:
            return f"it did not end within {LATE_S:.0f} s after its time"
        if code and not _has_room(self._folder):  # what it said of that may not have fitted either
            return f"the disk is full: {self._folder.parent}"
        lines = (self._folder / "stderr").read_text(errors="replace").strip().splitlines()
        return "" if code == 0 else (lines or [f"its process ended with exit code {code}"])[-1][:300]


def _has_room(folder: Path) -> bool:
    """Whether a megabyte more can be written there."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            return file.write(bytes(_ROOM)) == _ROOM
    except OSError as e:
        return not is_full(e)


def _text(told: Told) -> str:
    return msgspec.json.encode(told).decode()
