"""The last steps of a run that goes on, of all its processes, ready to be judged.

Records come in with the codes of the process that wrote them and get global ones at once, for all processes together, so
that what a round costs depends on the records and hardly on how many processes sent them. Held are the first steps
(`windows.PROLOGUE`), the last ones, and of older states the last of each variable; everything else is let go.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import msgspec
import numpy as np
import polars as pl
import pyarrow as pa

from proctor.errors import TraceError
from proctor.invariants.schema import CONTEXT, MAX_NAME_CHARS, TABLES, Name
from proctor.invariants.trace import Process, Trace, process_of
from proctor.invariants.trace.grouping import Array, Rows, numbers, pairs, pick
from proctor.invariants.trace.windows import PROLOGUE, Window
from proctor.invariants.wire import frames
from proctor.invariants.wire.arrow_message import Unread
from proctor.verify.live.contexts import Contexts
from proctor.verify.live.rows import (
    Held,
    batch,
    by_process,
    columns,
    height,
    join,
    last_states,
    none_of,
    together,
)
from proctor.verify.live.views import Views

Records = Mapping[str, pa.Table | pa.RecordBatch]
"""Rows of any of the tables of `invariants.schema`, with the codes of the process that wrote them."""

_ROWS: Final = {
    "calls": {"fn": Name.FUNCTION, "site": Name.SITE, "args": Name.SIGNATURE, "ret": Name.SIGNATURE},
    "states": {"var": Name.VARIABLE, "meta": Name.META},
    "values": {"place": Name.PLACE, "meta": Name.META},
}
_MARKS: Final = ("calls", "states")  # tables that any process of a training run has rows of
_MAX_CODES: Final = 1 << 26
_MAX_GAPS: Final = 256
_FRONTS: Final = 4  # groups of relations that are at different steps


class Member:
    """What one process has told of itself."""

    def __init__(self, number: int, folder: str) -> None:
        self.number, self.folder = number, folder
        self.info: Mapping[str, Any] = {}
        self.said = False  # it tells which step it has come to
        self.reached = -1  # the step it is in: all before it are whole
        self._gaps: list[tuple[int, int]] = []  # step until which records are missing, how many
        self._dropped = 0  # that it said it dropped itself
        self._process: Process | None = None
        self.look = b""  # what of it verdicts depend on
        self.gone = False  # it said goodbye, or its connection ended
        self.codes: dict[Name, Array] = {kind: np.zeros(1, dtype=np.uint32) for kind in Name}
        self.last = dict.fromkeys(_MARKS, -1)  # latest step that a table has rows of

    @property
    def world(self) -> int:
        """Ranks of its job, as far as it said."""
        said = self.info.get("world")
        return said if isinstance(said, int) and not isinstance(said, bool) and 0 < said < 1 << 20 else 1

    @property
    def trains(self) -> bool:
        return self.reached >= 0

    def tell(self, info: Mapping[str, Any]) -> None:
        """Its `process.json` is another one now."""
        self.info = dict(info)
        self._process = None
        told = process_of(info, 0, "", self.folder)
        self.look = repr((told.rank, told.world, told.coords, told.unobserved, told.blind)).encode()
        self.lose(told.dropped - self._dropped)
        self._dropped = told.dropped

    def lose(self, rows: int) -> None:
        """Records up to the step that it is in did not arrive."""
        if rows > 0:
            self._gaps = [*self._gaps, (self.reached, rows)][-_MAX_GAPS:]

    def process(self, program: str, since: int) -> Process:
        """As a trace has it whose records begin with the step `since`: only losses that concern these count."""
        if self._process is None or self._process.program != program:
            self._process = msgspec.structs.replace(process_of(self.info, 0, program, self.folder), dropped=0)
        lost = self.lost(since)
        return msgspec.structs.replace(self._process, dropped=lost) if lost else self._process

    def lost(self, since: int) -> int:
        """Records that did not arrive of the steps from this one on."""
        return sum(rows for until, rows in self._gaps if until >= since) if self._gaps else 0

    def waits(self, seconds: float) -> bool:
        """Whether a call of it had not returned for longer than this, when it was last heard of."""
        return bool(self.info.get("open")) and any(call.seconds > seconds for call in self.process("", 0).waiting)


class LiveTrace:
    """Takes records as they come, gives windows of them.

    Args:
        run: the run's directory, or another name.
        program: as `run.json` says.
    """

    def __init__(self, run: str, program: str) -> None:
        self.run, self.program = run, program
        self.members: dict[str, Member] = {}
        self._order: list[Member] = []
        self._index: dict[Name, dict[str, int]] = {kind: {"": 0} for kind in Name}
        self._texts: dict[Name, list[str]] = {kind: [""] for kind in Name}
        self._waiting: dict[str, list[tuple[int, Held]]] = {name: [] for name in TABLES}
        self._tables: dict[Name, tuple[Array, Array, Array]] = {}  # codes of all members, one after the other
        self._contexts = Contexts()
        self._rows: dict[str, dict[int, list[Rows]]] = {name: {} for name in _ROWS}  # by step, as they came
        self._shelved = 0  # rows in them
        self._carried = self._empty("states")
        self._fronts: dict[int, Rows] = {}  # what `older` gave last, by step
        self._held = np.zeros(0, dtype=np.uint64)
        self._views = Views(self._texts)
        self.revisions: dict[int, int] = {}
        """How often rows of a step came in, for each step that is held."""
        self.version = 0
        """Rises whenever these change."""
        self.forgotten = PROLOGUE
        """Steps before this one are not held, the first ones aside."""

    @property
    def rows(self) -> int:
        """Records that are held."""
        waiting: int = sum(held.num_rows for name in _ROWS for _, held in self._waiting[name])
        return waiting + self._shelved

    @property
    def coords(self) -> dict[int, dict[str, int]]:
        """Mesh coordinates of each rank."""
        said = [member.process(self.program, 0) for member in self._order]
        return {process.rank: process.coords for process in said}

    @property
    def order(self) -> Sequence[Member]:
        """Processes by the numbers that rows have in `proc`."""
        return self._order

    def member(self, name: str) -> Member:
        """The process of this name; a new one when it is not known."""
        found = self.members.get(name)
        if found is None:
            found = self.members[name] = Member(len(self._order), name)
            self._order.append(found)
            self._tables.clear()
        return found

    def add(self, name: str, records: Records, info: Mapping[str, Any] | None = None, reached: int | None = None) -> None:
        """Take records of one process; nothing is computed yet.

        Args:
            name: of the process.
            records: some rows of some tables, in the order in which they were written.
            info: its `process.json`, when it is known anew.
            reached: the step that the process was in when it let go of these records.

        Raises:
            TraceError: a table that no trace has, or one with other columns.
        """
        came: list[tuple[str, pa.Table | Held]] = list(records.unread() if isinstance(records, frames.Records) else records.items())
        for table, rows in came:
            if table not in TABLES or not (isinstance(rows, Unread) or rows.schema.equals(TABLES[table])):
                raise TraceError(f"{name}: records of {table!r} do not have the columns of a trace")
        member = self.member(name)
        if info is not None:
            member.tell(info)
        for table, rows in came:
            parts: list[Held] = rows.to_batches() if isinstance(rows, pa.Table) else [rows]
            self._waiting[table] += [(member.number, part) for part in parts if part.num_rows]
        if reached is not None:
            member.said = True
            member.reached = max(member.reached, reached)

    def roster(self, since: int) -> bytes:
        """Digest of what is known of the processes, when the records begin with the step `since`."""
        digest = hashlib.blake2b(repr([m.number for m in self._order if m.lost(since)]).encode(), digest_size=16)
        digest.update(len(self._held).to_bytes(8, "little"))
        digest.update(b"\n".join(member.look for member in self._order))
        return digest.digest()

    # -- codes -------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Give global codes to what came in since."""
        named, self._waiting["names"] = self._waiting["names"], []
        for number, held in named:
            self._name(self._order[number], batch(held))
        told, self._waiting["context"] = self._waiting["context"], []
        if told:
            self._contexts.add(_procs(told), together([held for _, held in told]))
        for table, coded in _ROWS.items():
            came, self._waiting[table] = self._waiting[table], []
            if not came:
                continue
            procs = _procs(came)
            rows = dict(columns([held for _, held in came]))
            keys = pairs(procs, rows["ctx"])
            steps, looks = self._contexts.of(keys)
            rows |= {c: self._globals(kind, procs, rows[c]) for c, kind in coded.items()}
            rows |= {"proc": procs, "_key": keys, "_step": steps, "_look": looks}
            self._shelve(table, rows, steps)
            if table == "states":
                self._hold(procs, rows["var"])
            if table in _MARKS:
                last = np.full(len(self._order), -1, dtype=np.int32)
                np.maximum.at(last, procs, steps)
                for number in np.flatnonzero(last >= 0).tolist():
                    marks = self._order[number].last
                    marks[table] = max(marks[table], int(last[number]))
        for member in self._order:
            if not member.said:
                member.reached = max(member.reached, min(member.last.values()))

    def _shelve(self, table: str, rows: Rows, steps: Array) -> None:
        """Put rows to those of their steps."""
        first, last = int(steps.min()), int(steps.max())
        if first == last:
            parts = [(first, rows)]
        else:
            by_step = np.argsort(steps, kind="stable")
            bounds = [0, *(np.flatnonzero(np.diff(steps[by_step])) + 1).tolist(), len(steps)]
            parts = [(int(steps[by_step[a]]), pick(rows, by_step[a:b])) for a, b in pairwise(bounds)]
        for step, part in parts:
            self._rows[table].setdefault(step, []).append(part)
            self.revisions[step] = self.revisions.get(step, 0) + 1
        self.version += 1
        self._shelved += len(steps)
        if table == "states":
            self._fronts = {before: states for before, states in self._fronts.items() if before <= first}

    def _name(self, member: Member, rows: pa.RecordBatch) -> None:
        kinds, ids, texts = (rows.column(c).to_pylist() for c in ("kind", "id", "text"))
        for kind, code, text in zip(kinds, ids, texts, strict=True):
            if kind not in Name._value2member_map_ or text is None or len(text) > MAX_NAME_CHARS or code > _MAX_CODES:
                continue
            of = Name(kind)
            index, table = self._index[of], member.codes[of]
            if code >= len(table):
                table = member.codes[of] = np.concatenate([table, np.zeros(max(code + 1, len(table)), dtype=np.uint32)])
            self._tables.pop(of, None)
            if text not in index:
                index[text] = len(index)
                self._texts[of].append(text)
            table[code] = index[text]

    def _globals(self, kind: Name, procs: Array, codes: Array) -> Array:
        """Global codes of local ones; those without a name become 0."""
        if kind not in self._tables:
            tables = [member.codes[kind] for member in self._order]
            sizes = np.array([len(table) for table in tables])
            self._tables[kind] = np.concatenate(tables), np.concatenate([[0], np.cumsum(sizes)[:-1]]), sizes
        table, starts, sizes = self._tables[kind]
        taken: Array = table[starts[procs] + np.where(codes < sizes[procs], codes, 0)]
        return taken

    def _hold(self, procs: Array, variables: Array) -> None:
        keys = pairs(procs, variables)
        new = keys
        if len(self._held):
            new = keys[self._held[np.minimum(np.searchsorted(self._held, keys), len(self._held) - 1)] != keys]
        if len(new):
            self._held = np.union1d(self._held, new)

    def texts(self, kind: Name) -> Sequence[str]:
        """Of the global codes."""
        return self._texts[kind]

    def codes(self, kind: Name) -> Mapping[str, int]:
        """Global codes of texts."""
        return self._index[kind]

    # -- windows -------------------------------------------------------------------------------------------------

    def rows_of(self, table: str, step: int) -> Rows | None:
        """Rows of one step in the order in which they came, with global codes, `_step` and `_look`; proc is a member's number."""
        chunks = self._rows[table].get(step)
        if chunks is None:
            return None
        if len(chunks) > 1:
            chunks[:] = [join(chunks)]
        return chunks[0]

    def older(self, before: int) -> Rows:
        """The last state of each variable from before a step, the first steps aside, those of a process together.

        Windows move on: what is asked for is made from what was given for an earlier step, and the same while nothing is new.
        """
        if before in self._fronts:
            return self._fronts[before]
        start = max((step for step in self._fronts if step <= before), default=PROLOGUE)
        states = self._fronts.pop(start, self._carried)
        there, steps = self._rows["states"], range(max(start, PROLOGUE), before)
        held = [step for step in (steps if len(steps) < len(there) else sorted(there)) if step in steps and step in there]
        if held:
            states = last_states([states, *(by_process(rows) for step in held if (rows := self.rows_of("states", step)) is not None)])
        self._fronts[before] = states
        if len(self._fronts) > _FRONTS:
            del self._fronts[next(iter(self._fronts))]
        return states

    def forget(self, before: int) -> None:
        """Let go of steps before this one, the first steps aside; of their states the last of each variable stays."""
        if before <= self.forgotten:
            return
        self._carried = self.older(before)
        self.forgotten = before
        self._fronts = {step: states for step, states in self._fronts.items() if step >= before}
        gone = [step for step in self.revisions if PROLOGUE <= step < before]
        self.version += 1
        for step in gone:
            del self.revisions[step]
            for shelf in self._rows.values():
                self._shelved -= sum(height(chunk) for chunk in shelf.pop(step, ()))
        self._contexts.prune(before, self._carried["_key"])

    def window(self, window: Window) -> Trace:
        """What is held of a window, of records that were settled, as a trace of its own."""
        order = sorted(self._order, key=lambda m: (str(m.info.get("rank", "")).zfill(9), m.folder))
        place = np.empty(len(order), dtype=np.uint16)
        place[[member.number for member in order]] = np.arange(len(order), dtype=np.uint16)

        known = self._contexts.frame()
        steps = numbers(known["step"], -1)
        kept = np.flatnonzero(window.keeps(steps) | window.before(steps))
        codes = np.arange(1, len(kept) + 1, dtype=np.uint32)
        keys = known["_key"].to_numpy()[kept]
        marks = {"ctx": codes, "proc": place[known["proc"].to_numpy()[kept]]}
        contexts = pl.DataFrame(marks).hstack(known[CONTEXT.names[1:]][kept].get_columns())

        frames: dict[str, pl.DataFrame] = {}
        for table, shelf in self._rows.items():
            there = np.array(sorted(shelf), dtype=np.int64)
            held = (self.rows_of(table, step) for step in there[window.keeps(there)].tolist())
            parts = [rows for rows in held if rows is not None]
            if table == "states":
                parts.insert(0, self.older(window.first - window.reach))
            rows = join(parts) if parts else self._empty(table)
            procs = place[rows["proc"]]
            by_seq = np.argsort(pairs(procs, rows["seq"]), kind="stable")
            taken = {**rows, "proc": procs, "ctx": _looked_up(keys, codes, rows["_key"], 0).astype(np.uint32)}
            frames[table] = pl.DataFrame({name: taken[name][by_seq] for name in ("proc", *TABLES[table].names)})
        seen = pl.DataFrame({"proc": place[(self._held >> np.uint64(32)).astype(np.int64)], "var": self._held.astype(np.uint32)})
        trace = Trace(
            processes=[member.process(self.program, window.first - window.reach) for member in order],
            runs=[self.run],
            calls=frames["calls"],
            states=frames["states"],
            values=frames["values"],
            contexts=contexts,
            texts=self._texts,
            held=seen.sort("proc", "var"),
        )
        self._views.lend(trace)
        return trace

    def _empty(self, table: str) -> Rows:
        added = {"proc": np.uint16, "_key": np.uint64, "_step": np.int32, "_look": np.uint64}
        return none_of(TABLES[table]) | {name: np.zeros(0, dtype=kind) for name, kind in added.items()}


def _procs(waiting: Sequence[tuple[int, Held]]) -> Array:
    """Number of the process of each row of these."""
    numbers = np.array([number for number, _ in waiting], dtype=np.uint16)
    return np.repeat(numbers, [held.num_rows for _, held in waiting])


def _looked_up(keys: Array, values: Array, wanted: Array, default: int) -> Array:
    """Values of sorted keys; the default where there is no such key."""
    if not len(keys):
        return np.full(len(wanted), default, dtype=np.int32)
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    found: Array = np.where(keys[at] == wanted, values[at], default).astype(np.int32)
    return found
