"""What workers of one campaign tell each other while they run: which failure one of them is making small, and what was found.

    DIR/claims/<symptom>      a failure that a worker looks into; the file says which worker. It is gone once that is done
    DIR/findings/<id>/        as the journal writes them

Making a failure small takes minutes. A worker that meets a failure which another one looks into puts it aside, and looks again once that one is done: it is
explained then, or it is another failure after all. All of that is files of the campaign's directory; on a cluster each piece has a directory of its own, and `sessions/relay.py` carries
files between them.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Container
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from proctor.invariants.files import UNREADABLE, read_file
from proctor.oracle.fuzz.running.outcome import Symptom
from proctor.oracle.fuzz.search.findings import Finding

CLAIMS: Final = "claims"
LAPSED_S: Final = 900.0  # a claim that is older is of a worker that is gone
_MOST_BYTES: Final = 16 << 20  # of a finding


class Board:
    """A campaign's directory, as one worker sees it.

    Args:
        folder: of the campaign.
        name: of the worker; no other has it.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        (folder / CLAIMS).mkdir(parents=True, exist_ok=True)

    def claim(self, symptom: Symptom) -> bool:
        """Whether this worker may look into a failure; False while another one does."""
        file = self._file(symptom)
        for _ in range(2):
            try:
                with file.open("x") as new:
                    new.write(self._name)
                return True
            except FileExistsError:
                with suppress(OSError):
                    if file.read_text() == self._name:
                        return True
                    if time.time() - file.stat().st_mtime <= LAPSED_S:
                        return False
                    file.unlink()
            except OSError:  # no room, or no directory: it is looked into twice at worst
                return True
        return False

    def release(self, symptom: Symptom) -> None:
        """The failure is a finding now, or was not seen again."""
        with suppress(OSError):
            self._file(symptom).unlink()

    def news(self, have: Container[str]) -> list[Finding]:
        """Findings of others.

        Args:
            have: ids of those that are known here.
        """
        found = []
        for file in sorted((self._folder / "findings").glob("*/scenario.json")):
            if file.parent.name not in have:
                with suppress(OSError, *UNREADABLE):  # it is being written
                    found.append(msgspec.json.decode(read_file(file, _MOST_BYTES), type=Finding))
        return found

    def _file(self, symptom: Symptom) -> Path:
        return self._folder / CLAIMS / key_of(symptom)


def key_of(symptom: Symptom) -> str:
    """Short name of a symptom."""
    return hashlib.blake2b(msgspec.json.encode(symptom), digest_size=8).hexdigest()
