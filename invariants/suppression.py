"""Suppressions and baselines: violations that somebody decided not to hear of, why, and until when.

A suppression names one rule, is signed, and ends: what it hides is counted and shown with its reason, never dropped.
A baseline is the list of violations of an earlier check: what was there before is not news. Both are data from
somebody else as often as not, so they are decoded by type.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Final

import msgspec

from proctor.errors import PackError
from proctor.invariants.files import UNREADABLE, read_file, replace_file

MAX_BYTES: Final = 16 * 1024 * 1024
BASELINE_SCHEMA: Final = 1


class Suppression(msgspec.Struct, frozen=True, order=True, omit_defaults=True):
    """Violations of one rule that are expected.

    Args:
        rule: id of the rule.
        reason: why, for whoever reads the report.
        until: last day on which it holds, YYYY-MM-DD; "": no end.
        program: only in runs of this program; "": in all.
        by: who decided it.
    """

    rule: str
    reason: str
    until: str = ""
    program: str = ""
    by: str = ""

    def expired(self, today: date) -> bool:
        return bool(self.until) and date.fromisoformat(self.until) < today

    def covers(self, rule: str, programs: Iterable[str]) -> bool:
        """Whether it speaks of this rule in a run of these programs."""
        return self.rule == rule and (not self.program or set(programs) == {self.program})

    def __post_init__(self) -> None:
        if self.until:
            parse_date(self.until)


class Known(msgspec.Struct, frozen=True, order=True):
    """A violation that an earlier check found, without its step: it may begin elsewhere the next time."""

    rule: str
    program: str
    text: str
    function: str = ""
    variable: str = ""


class _Suppressions(msgspec.Struct, forbid_unknown_fields=True):
    suppress: list[Suppression] = []


class _Stamped(msgspec.Struct):
    schema: int


class _Baseline(_Stamped):
    known: list[Known]


def parse_date(text: str) -> date:
    """A day, YYYY-MM-DD.

    Raises:
        ValueError: anything else.
    """
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", text):
        raise ValueError(f"{text!r} is no date: expected YYYY-MM-DD")
    return date.fromisoformat(text)


def read_suppressions(path: Path) -> tuple[Suppression, ...]:
    """Read a file of suppressions: TOML with tables `[[suppress]]`, or JSON of the same shape.

    Raises:
        PackError: it cannot be read, or something in it is not a suppression.
    """
    blob = _read(path)
    try:
        if path.suffix == ".json":
            found = msgspec.json.decode(blob, type=_Suppressions)
        else:
            found = msgspec.convert(_plain(tomllib.loads(blob.decode())), _Suppressions)
    except UNREADABLE as e:
        raise PackError(f"{path}: not a file of suppressions: {e}", hint="proctor pack suppress PACK ID --to FILE") from None
    return tuple(found.suppress)


def write_suppressions(suppressions: Sequence[Suppression], path: Path) -> None:
    """Write a file of suppressions, JSON where its name says so, else TOML.

    Raises:
        PackError: the file cannot be written.
    """
    if path.suffix == ".json":
        text = json.dumps({"suppress": msgspec.to_builtins(suppressions)}, indent=1) + "\n"
    else:
        text = "\n".join(_table(s) for s in suppressions)
    _write(path, text)


def read_baseline(path: Path) -> frozenset[Known]:
    """Read what `write_baseline` wrote.

    Raises:
        PackError: it cannot be read, is no baseline, or is of a newer schema.
    """
    try:
        blob = _read(path)
        schema = msgspec.json.decode(blob, type=_Stamped).schema
        if schema > BASELINE_SCHEMA:
            raise PackError(f"{path}: baseline schema {schema}, this Proctor reads up to {BASELINE_SCHEMA}")
        return frozenset(msgspec.json.decode(blob, type=_Baseline).known)
    except UNREADABLE as e:
        raise PackError(f"{path}: not a baseline: {e}", hint="proctor check RUN -i PACK --write-baseline FILE") from None


def write_baseline(known: Iterable[Known], path: Path) -> None:
    """Write violations as a baseline, one a line.

    Raises:
        PackError: the file cannot be written.
    """
    lines = ",\n  ".join(msgspec.json.encode(k).decode() for k in sorted(set(known)))
    _write(path, f'{{"schema":{BASELINE_SCHEMA},\n "known":[\n  {lines}\n ]}}\n')


def _read(path: Path) -> bytes:
    try:
        return read_file(path, MAX_BYTES)
    except OSError as e:
        raise PackError(f"{path}: {e.strerror or e}") from None


def _write(path: Path, text: str) -> None:
    try:
        replace_file(path, text.encode())
    except OSError as e:
        raise PackError(f"{path}: {e.strerror or e}") from None


def _table(suppression: Suppression) -> str:
    pairs = [(k, v) for k, v in msgspec.to_builtins(suppression).items() if v]
    return "[[suppress]]\n" + "".join(f"{k} = {_quoted(v)}\n" for k, v in pairs)


def _quoted(text: str) -> str:
    """A basic string of TOML, which is one of JSON but for DEL and lone surrogates."""
    return json.dumps(text.encode(errors="replace").decode(), ensure_ascii=False).replace("\x7f", "\\u007f")


def _plain(tree: object) -> object:
    """TOML has dates of its own; ours are texts."""
    if isinstance(tree, dict):
        return {k: _plain(v) for k, v in tree.items()}
    if isinstance(tree, list):
        return [_plain(v) for v in tree]
    return tree.isoformat() if isinstance(tree, date) else tree
