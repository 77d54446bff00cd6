"""Rows as a process lets go of them, and a server that listens for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from proctor.instrument.guard import Guard
from proctor.instrument.record.stream import Sender
from proctor.invariants.schema import TABLES
from proctor.invariants.wire.arrow_message import Encoded
from proctor.invariants.wire.peer import make_token, read_token
from proctor.verify.transport.endpoint import Limits
from proctor.verify.transport.inbox import Event, Inbox
from proctor.verify.transport.server import Server

TOKEN = b"0123456789abcdef0123456789abcdef"


def batch(table: str, rows: int, first: int = 0) -> pa.RecordBatch:
    """Rows whose every number is its own, so that none can be lost or doubled unseen."""
    arrays = []
    for field in TABLES[table]:
        numbers = np.arange(first, first + rows)
        if pa.types.is_string(field.type):
            arrays.append(pa.array([f"{field.name} {n}" for n in numbers], type=field.type))
        elif pa.types.is_boolean(field.type):
            arrays.append(pa.array(numbers % 2 == 0, type=field.type))
        else:
            arrays.append(pa.array((numbers % 251 if field.type.bit_width == 8 else numbers).astype(field.type.to_pandas_dtype())))
    return pa.RecordBatch.from_arrays(arrays, schema=TABLES[table])


class Rows:
    """Flush after flush of one process, numbered on."""

    def __init__(self) -> None:
        self.at = dict.fromkeys(TABLES, 0)

    def next(self, calls: int = 20, **others: int) -> dict[str, pa.RecordBatch]:
        counts = {"calls": calls, "states": calls // 2, "context": 1, **others}
        made = {t: batch(t, n, self.at[t]) for t, n in counts.items() if n}
        for table, rows in made.items():
            self.at[table] += rows.num_rows
        return made


def encoded(rows: Mapping[str, pa.RecordBatch]) -> dict[str, Encoded]:
    """As a process offers them to its verifier."""
    return {table: Encoded.of(batch) for table, batch in rows.items()}


def until(condition: Callable[[], Any], timeout_s: float = 10.0) -> bool:
    """Whether something becomes true in time."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.005)
    return bool(condition())


def take(inbox: Inbox, enough: Callable[[list[Event]], bool], timeout_s: float = 10.0) -> list[Event]:
    """Events until there are enough of them."""
    events: list[Event] = []
    end = time.monotonic() + timeout_s
    while not enough(events) and time.monotonic() < end:
        events += inbox.get(0.05)
    return events


@contextmanager
def serving(folder: Path, inbox: Inbox | None = None, address: str = "", **settings: Any) -> Iterator[tuple[Server, Inbox]]:
    """A server on a Unix socket below a folder, with the token `folder/token`."""
    token = folder / "token"
    if not token.exists():
        make_token(token)
    inbox = Inbox() if inbox is None else inbox
    settings.setdefault("limits", Limits())
    with Server([address or f"unix:{folder}/live/sock"], read_token(token), inbox, **settings) as server:
        yield server, inbox


def sender(folder: Path, name: str = "0-1", address: str = "", info: dict[str, Any] | None = None, **settings: Any) -> Sender:
    """A process's end, not started."""
    told = {"rank": 0, "world": 1, **(info or {})}
    return Sender(address or f"unix:{folder}/live/sock", folder / "token", lambda: (name, "here", told), Guard(), **settings)
