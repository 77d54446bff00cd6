"""What lies beside a run's records: incidents that a verifier followed, and capsules of steps that it kept.

Read from the run directory and shown, never trusted: sizes and numbers are bounded, links are not followed, and what
cannot be read is left out.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from proctor.invariants.verdict import Violation
from proctor.verify.wording import clean

INCIDENTS: Final = Path("verify", "incidents.json")
CAPSULES: Final = "capsules"
MAX_BYTES: Final = 64 * 1024 * 1024  # as much as a verifier writes
MAX_CAPSULES: Final = 256
MAX_RULES: Final = 500  # of one incident
MAX_VIOLATIONS: Final = 50  # of one incident
_HEAD_BYTES: Final = 1024 * 1024  # of a capsule's description
_SAFE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_STATES: Final = ("firing", "suspected", "resolved")


@dataclass(frozen=True)
class Capsule:
    """A step that was kept: its folder below the run, and which incident, step and rank it is of."""

    path: str
    key: str = ""
    step: int | None = None
    rank: int | None = None


@dataclass(frozen=True)
class Followed:
    """An incident as the verifier last had it.

    Attributes:
        not_kept: why there is no capsule.
    """

    key: str
    title: str
    state: str
    severity: str = "error"
    code: str = ""
    first_step: int | None = None
    began: str = ""
    ended: str = ""
    ranks: str = ""
    axis: str = ""
    flaps: int = 0
    capsule: str = ""
    not_kept: str = ""
    rules: frozenset[str] = frozenset()
    violations: tuple[Violation, ...] = ()

    def of(self, rules: set[str]) -> bool:
        """Whether one of these rules is in it; its key names the first: `proctor:<job>:<rule>:<scope>`."""
        return not rules.isdisjoint(self.rules) or _rule(self.key) in rules


@dataclass(frozen=True)
class Beside:
    """Incidents and capsules of one run."""

    followed: list[Followed] = field(default_factory=list)
    capsules: list[Capsule] = field(default_factory=list)

    def incident_of(self, rules: set[str]) -> Followed | None:
        """The followed incident that one of these rules began; one that still fires before one that is over."""
        found = [f for f in self.followed if f.of(rules)]
        return min(found, key=lambda f: _STATES.index(f.state) if f.state in _STATES else len(_STATES), default=None)

    def capsules_of(self, rules: set[str]) -> list[Capsule]:
        """Capsules of incidents that one of these rules is in."""
        keys = {f.key for f in self.followed if f.of(rules)}
        return [c for c in self.capsules if c.key in keys or _rule(c.key) in rules]


def read_beside(folder: Path) -> Beside:
    """What a run directory has besides records; nothing when it has nothing."""
    return Beside(_followed(folder / INCIDENTS), list(_capsules(folder)))


def _followed(path: Path) -> list[Followed]:
    tree = read_json(path, MAX_BYTES)
    rows = tree.get("incidents") if isinstance(tree, dict) else tree
    if isinstance(rows, dict):
        rows = list(rows.values())
    if not isinstance(rows, list):
        return []
    found = [followed(row) for row in rows if isinstance(row, dict) and not row.get("merged")]
    return sorted(found, key=lambda f: (_STATES.index(f.state) if f.state in _STATES else len(_STATES), f.began))


def followed(row: Mapping[str, Any]) -> Followed:
    """One incident from its record, whatever of it is there."""
    first = row.get("first_step", row.get("step"))
    minority = row.get("ranks") or row.get("minority") or ""
    rules = row.get("rules")
    flaps = row.get("flaps", 0)
    return Followed(
        key=_text(row.get("key")),
        title=_text(row.get("title")) or "(no title)",
        state=_text(row.get("state")).lower() or "firing",
        severity=_text(row.get("severity")) or "error",
        code=_text(row.get("code")),
        first_step=first if isinstance(first, int) and not isinstance(first, bool) else None,
        began=moment(row.get("began")),
        ended=moment(row.get("ended")),
        ranks=_who(minority),
        axis=_text(row.get("axis")),
        flaps=flaps if isinstance(flaps, int) and not isinstance(flaps, bool) else 0,
        capsule=_text(row.get("capsule")),
        not_kept=_text(row.get("not_kept")),
        violations=_violations(row.get("violations")),
        rules=frozenset(str(r)[:200] for r in list(rules)[:MAX_RULES]) if isinstance(rules, dict | list) else frozenset(),
    )


def _who(minority: Any) -> str:
    """Which ranks: their numbers, or what was said of them."""
    text = ", ".join(str(r) for r in minority[:16]) if isinstance(minority, list) else _text(minority)
    return f"ranks {text}" if text[:1].isdigit() else text


def _capsules(folder: Path) -> Iterator[Capsule]:
    root = folder / CAPSULES
    try:
        names = sorted(e.name for e in os.scandir(root) if e.is_dir(follow_symlinks=False) and _SAFE.fullmatch(e.name))
    except OSError:
        return
    for name in names[:MAX_CAPSULES]:
        said = read_json(root / name / "capsule.json", _HEAD_BYTES)
        if not isinstance(said, dict):
            continue
        step, rank = said.get("step"), said.get("rank")
        yield Capsule(
            path=f"{CAPSULES}/{name}",
            key=_text(said.get("key")),
            step=step if isinstance(step, int) else None,
            rank=rank if isinstance(rank, int) else None,
        )


def read_json(path: Path, limit: int) -> Any:
    """The JSON of a regular file of at most `limit` bytes; `None` without one."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        with open(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > limit:
                return None
            return json.loads(file.read(limit + 1))
    except (OSError, ValueError, RecursionError):
        return None


def moment(seconds: object) -> str:
    """Epoch seconds for a reader, in UTC; "" for anything else."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        return ""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return ""


def _violations(rows: object) -> tuple[Violation, ...]:
    try:
        return tuple(msgspec.convert(rows[:MAX_VIOLATIONS], list[Violation])) if isinstance(rows, list) else ()
    except (msgspec.ValidationError, RecursionError):
        return ()


def _rule(key: str) -> str:
    parts = key.split(":")
    return parts[-2] if len(parts) >= 4 and parts[0] == "proctor" else ""


def _text(value: object) -> str:
    return clean(value, 400) if isinstance(value, str) else ""
