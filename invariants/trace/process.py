"""One recorded process, from its `process.json`: what others wrote, so each field is taken only where it makes sense.

`merge` and the live checker call `process_of`. No file makes it raise:

    {"rank": 1, "world": 4, "pid": 77, "dropped": 0, "finished": true, "unobserved": ["torch.nn.functional.relu"]}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from proctor.invariants.codec import definition
from proctor.invariants.files import read_file
from proctor.invariants.schema import ALL_ENDED, BLIND_FILE

_MAX_WAITING = 64  # calls of one process
_MAX_UNOBSERVED = 5_000  # names of functions
_MAX_BLIND = 100  # errors of ours


class Waiting(msgspec.Struct, frozen=True):
    """A collective that had not returned when its process was last heard of."""

    place: str  # `invariants.collective`
    item: int  # calls that the process made on the group before
    seconds: float  # how long it had been waiting
    site: str = ""
    call: int = 0


class Process(msgspec.Struct, frozen=True):
    """One recorded process of a run."""

    run: int
    rank: int
    world: int
    pid: int
    program: str
    folder: str
    coords: dict[str, int] = {}  # mesh coordinates by axis name, where known
    dropped: int = 0  # records lost
    notes: list[str] = []  # degradations, one sentence each
    finished: bool = False  # the process said goodbye
    waiting: list[Waiting] = []
    unobserved: list[str] = []  # functions that may have been called without a record
    damaged: int | None = None  # the step from which records are missing in its files, which are not as they were written
    definitions: dict[str, str] = {}  # what the user's functions and classes are (`invariants.definition`), by name
    steps: int = 0  # that it has counted; 0 in a trace that does not say so
    left_out: int = 0  # of them, those that were not recorded: by a budget, by `--every`, or since the disk was full
    blind: list[tuple[str, int]] = []  # what an error of ours ended, and in which step (`invariants.blindness`)


def process_of(info: Mapping[str, Any], run: int, program: str, folder: str) -> Process:
    """What a `process.json` says; fields that make no sense are as if they were not there."""
    coords, notes, unseen = info.get("coords"), info.get("notes", []), info.get("unobserved")
    return Process(
        run=run,
        rank=whole_number(info.get("rank"), 0),
        world=whole_number(info.get("world"), 1),
        pid=whole_number(info.get("pid"), 0),
        program=program,
        folder=folder,
        coords={str(k): whole_number(v, 0) for k, v in coords.items()} if isinstance(coords, dict) else {},
        dropped=whole_number(info.get("dropped"), 0),
        notes=[str(n) for n in notes] if isinstance(notes, list) else [],
        finished=bool(info.get("finished", False)),
        waiting=_waiting(info),
        unobserved=[str(n) for n in unseen[:_MAX_UNOBSERVED]] if isinstance(unseen, list) else [],
        definitions=_definitions(info.get("definitions")),
        steps=whole_number(info.get("steps"), 0),
        left_out=whole_number(info.get("left_out"), 0),
        blind=_blind(info.get("blind")),
    )


def word_left(folder: Path) -> list[object] | None:
    """The pair of a process whose writer ended, None where it left no word."""
    try:
        text = read_file(folder / BLIND_FILE, 64)
    except FileNotFoundError:
        return None
    except OSError:
        return [ALL_ENDED, -1]
    try:
        return [ALL_ENDED, max(int(text), -1)]
    except ValueError:
        return [ALL_ENDED, -1]


def _definitions(said: Any) -> dict[str, str]:
    pairs = list(said.items())[:_MAX_UNOBSERVED] if isinstance(said, dict) else []
    return {name: text for name, text in pairs if isinstance(text, str) and len(text) <= definition.MAX_CHARS}


def _blind(said: Any) -> list[tuple[str, int]]:
    pairs = [p for p in said[:_MAX_BLIND] if isinstance(p, list) and len(p) == 2] if isinstance(said, list) else []
    return [(str(what)[:100], step) for what, step in pairs if isinstance(step, int) and not isinstance(step, bool)]


def _waiting(info: Mapping[str, Any]) -> list[Waiting]:
    said, now = info.get("open"), info.get("clock")
    found = []
    for one in said[:_MAX_WAITING] if isinstance(said, list) else []:
        since = one.get("since") if isinstance(one, dict) else None
        if isinstance(since, int) and isinstance(now, int) and isinstance(one.get("place"), str):
            seconds = min(max((now - since) / 1e9, 0.0), 1e9)
            found.append(Waiting(one["place"], whole_number(one.get("item"), 0), seconds, str(one.get("site", "")), whole_number(one.get("call"), 0)))
    return found


def whole_number(value: Any, default: int) -> int:
    fits = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31
    return int(value) if fits else default
