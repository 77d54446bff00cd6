"""Verdicts that are kept by the content of what was judged: the same two programs are not judged twice.

The key is a digest of all tapes (operations, numbers, lines), of where parts lie, and of the code that judges. So a program that has changed by
one number or operation has another key, and what another version of Proctor said is not asked for. An entry carries a digest
of itself: one that is damaged is not believed, and is judged anew. Recording is never left out: it is what shows that a program is the same.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from proctor.invariants.files import UNREADABLE, read_file
from proctor.oracle.prove.leaves import Alignment
from proctor.oracle.prove.tape import SCHEMA, Tape
from proctor.oracle.prove.verdict import Verdict

FORM: Final = 1
_MOST_BYTES: Final = 64 << 20
_MOST_ENTRIES: Final = 500
_DIGEST: Final = 64  # characters of a digest, and a line's end


class Entry(msgspec.Struct):
    """What is kept: the verdict with the proof, and the seconds of CPU that the proof was given."""

    key: str
    proof_s: float
    verdict: Verdict


class Cache:
    """Entries in a folder, each of them a file; `said` is told, in one line, what could not be used.

    Args:
        folder: made when the first entry is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[str] = []

    def find(self, key: str, proof_s: float) -> Verdict | None:
        """What was said before, if the proof had as much time then, or needs none."""
        path = self._path(key)
        try:
            head, _, body = read_file(path, _MOST_BYTES).partition(b"\n")
            if len(head) != _DIGEST or hashlib.sha256(body).hexdigest().encode() != head:
                raise ValueError("damaged")
            entry = msgspec.json.decode(body, type=Entry)
            if entry.key != key:
                raise ValueError("of another program")
        except FileNotFoundError:
            return None
        except (OSError, *UNREADABLE) as error:
            self.said.append(f"{path}: not used ({str(error)[:80]}); it is judged anew")
            return None
        final = entry.verdict.verdict in ("PROVED", "DIFFERENT") or entry.proof_s >= proof_s
        return entry.verdict if final else None

    def keep(self, key: str, verdict: Verdict, proof_s: float) -> None:
        """Write an entry, as a whole or not at all; the oldest ones give way."""
        body = msgspec.json.encode(Entry(key, proof_s, verdict))
        if len(body) > _MOST_BYTES:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, name = tempfile.mkstemp(dir=self.folder, suffix=".part")
            try:
                with os.fdopen(handle, "wb") as out:
                    out.write(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
                Path(name).replace(self._path(key))
            except OSError:
                Path(name).unlink(missing_ok=True)
                raise
            for old in sorted(self.folder.glob("verdict-*.json"), key=_age)[:-_MOST_ENTRIES]:
                old.unlink(missing_ok=True)
        except OSError as error:
            self.said.append(f"{self.folder}: the verdict is not kept ({error.strerror or error})")

    def _path(self, key: str) -> Path:
        return self.folder / f"verdict-{key[:40]}.json"


def _age(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def usual() -> Path:
    """`$XDG_CACHE_HOME/proctor/prove`, or that of ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(home) if home.startswith("/") else Path("~/.cache").expanduser()
    return base / "proctor" / "prove"


def key_of(reference: Tape, candidate: Sequence[Tape], alignment: Alignment) -> str:
    """What two programs are known by; `alignment`: which element is which, as a plan or their values say."""
    digest = hashlib.sha256(f"{FORM} {SCHEMA} {_code()} {np.__version__}\n{len(candidate)}\n".encode())
    said = [sorted(alignment.of.items()), sorted(alignment.merged), alignment.strange, alignment.unplaced, sorted(alignment.index)]
    digest.update(msgspec.json.encode(said))
    for _, index in sorted(alignment.index.items()):
        digest.update(np.ascontiguousarray(index).tobytes())
    for tape in (reference, *candidate):
        for part in _parts(tape):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _parts(tape: Tape) -> Iterable[bytes]:
    """All of a tape but the numbers of autograd, which count what the process did before."""
    plain = [field for field in tape.__struct_fields__ if field not in ("nodes", "blocks", "before")]
    yield msgspec.json.encode({field: getattr(tape, field) for field in plain})
    for node in tape.nodes:
        yield msgspec.json.encode(msgspec.structs.replace(node, seq=-1))
    for block in tape.blocks:
        yield block.dtype.str.encode()
        yield np.ascontiguousarray(block).tobytes()
    for event in tape.before:
        yield msgspec.json.encode(event.node)
        for array in (*event.given, *(value for _, value in event.left)):
            yield np.ascontiguousarray(array).tobytes()


@functools.cache
def _code() -> str:
    """A digest of the code that judges: its meanings, domains and laws."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.relative_to(Path(__file__).parent).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()
