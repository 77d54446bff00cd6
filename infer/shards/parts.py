"""Finished tasks on disk, so that an inference that was interrupted, or that gets one more run, does not begin again.

A part is one relation's result on one shard. It is named after everything that it depends on: what the run directory
holds, the window, the relation, the code of `invariants` and `infer`, and for examples the hypotheses. A file that is
damaged, or of something else, is as good as none. Nothing is pickled: parts are Arrow and JSON.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import msgspec
import polars as pl

from proctor import infer, invariants
from proctor.errors import ProctorError
from proctor.infer import shards
from proctor.infer.shards import Shard, Summary, partial
from proctor.infer.shards.partial import Partial
from proctor.invariants.files import replace_file
from proctor.invariants.invariant import Evidence, Hypothesis
from proctor.invariants.relations import Relation

_MAX_BYTES: Final = 4 << 30  # of a part
_Shown = dict[int, Evidence]


@dataclass(frozen=True)
class Parts:
    """A folder of parts.

    folder: made when the first part is kept.
    reuse: take parts that are there; else they are only written.
    """

    folder: Path
    reuse: bool = True

    # -- surveys -------------------------------------------------------------------------------------------------

    def survey(self, shard: Shard, relation: Relation) -> pl.DataFrame | None:
        held = self._read(self._survey_path(shard, relation))
        return held[0] if held is not None else None

    def keep_survey(self, shard: Shard, relation: Relation, survey: pl.DataFrame) -> None:
        self._write(self._survey_path(shard, relation), partial.encode_frame(survey, {}))

    def summaries(self, shard: Shard) -> list[Summary] | None:
        blob = self._blob(self._path("summary", shard, ""))
        try:
            return msgspec.json.decode(blob, type=list[Summary]) if blob is not None else None
        except msgspec.MsgspecError:
            return None

    def keep_summaries(self, shard: Shard, summaries: Sequence[Summary]) -> None:
        self._write(self._path("summary", shard, ""), msgspec.json.encode(summaries))

    # -- examples ------------------------------------------------------------------------------------------------

    def examples(
        self, shard: Shard, relation: Relation, hypotheses: Sequence[Hypothesis]
    ) -> tuple[Partial, _Shown] | None:
        blob = self._blob(self._examples_path(shard, relation, hypotheses))
        if blob is None:
            return None
        try:
            _, said = partial.decode_frame(blob)
            return partial.decode(blob), msgspec.json.decode(said["evidence"], type=_Shown)
        except (ValueError, KeyError, msgspec.MsgspecError):
            return None

    def keep_examples(
        self, shard: Shard, relation: Relation, hypotheses: Sequence[Hypothesis], found: Partial, shown: _Shown
    ) -> None:
        blob = partial.encode(found, {"evidence": msgspec.json.encode(shown)})
        self._write(self._examples_path(shard, relation, hypotheses), blob)

    # -- files ---------------------------------------------------------------------------------------------------

    def _survey_path(self, shard: Shard, relation: Relation) -> Path | None:
        return self._path("survey", shard, relation.name)

    def _examples_path(self, shard: Shard, relation: Relation, hypotheses: Sequence[Hypothesis]) -> Path | None:
        return self._path("examples", shard, relation.name, msgspec.json.encode(list(hypotheses)))

    def _path(self, kind: str, shard: Shard, relation: str, more: bytes = b"") -> Path | None:
        if not shard.paths:
            return None  # records in memory have no identity
        digest = hashlib.sha256(_code_digest())
        window = shard.window
        for what in (kind, relation, f"{window.first} {window.end}" if window else ""):
            digest.update(what.encode() + b"\0")
        digest.update(shards.fingerprint(shard) + b"\0" + more)
        return self.folder / f"{kind}-{digest.hexdigest()[:24]}.part"

    def _blob(self, path: Path | None) -> bytes | None:
        if path is None or not self.reuse:
            return None
        try:
            return path.read_bytes() if path.stat().st_size <= _MAX_BYTES else None
        except OSError:
            return None

    def _read(self, path: Path | None) -> tuple[pl.DataFrame, dict[str, bytes]] | None:
        blob = self._blob(path)
        try:
            return partial.decode_frame(blob) if blob is not None else None
        except ValueError:
            return None

    def _write(self, path: Path | None, blob: bytes) -> None:
        if path is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_file(path, blob)
        except OSError as e:
            raise ProctorError(f"{self.folder}: cannot keep finished parts: {e.strerror or e}", hint="--work DIR") from None


@cache
def _code_digest() -> bytes:
    """Of everything that parts are made by."""
    digest = hashlib.sha256()
    for room in (invariants, infer):
        for folder in room.__path__:
            for file in sorted(Path(folder).rglob("*.py")):
                digest.update(file.name.encode() + file.read_bytes())
    return digest.digest()
