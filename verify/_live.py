"""The last steps of a run that goes on, of all its processes, ready to be judged.

Records come in with the codes of the process that wrote them and get global ones at once, for all processes together, so
that what a round costs depends on the records and hardly on how many processes sent them. Held are the first steps
(`windows.PROLOGUE`), the last ones, and of older states the last of each variable; everything else is let go.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np
import polars as pl
import pyarrow as pa

from proctor.errors import TraceError
from proctor.invariants import signature
from proctor.invariants.schema import CONTEXT, MAX_NAME_CHARS, TABLES, Name
from proctor.invariants.trace import (
    Process,
    Trace,
    decode_variable,
    flat_meta,
    metas_frame,
    process_of,
    variables_frame,
)
from proctor.invariants.variable import Variable
from proctor.invariants.windows import PROLOGUE, Window

Array = np.ndarray[Any, Any]
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


class Member:
    """What one process has told of itself."""

    def __init__(self, number: int, folder: str) -> None:
        self.number, self.folder = number, folder
        self.info: Mapping[str, Any] = {}
        self.said = False  # it tells which step it has come to
        self.reached = -1  # the step it is in: all before it are whole
        self._gaps: list[tuple[int, int]] = []  # step until which records are missing, how many
        self._dropped = 0  # that it said it dropped itself
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
        dropped = process_of(info, 0, "", "").dropped
        self.lose(dropped - self._dropped)
        self._dropped = dropped

    def lose(self, rows: int) -> None:
        """Records up to the step that it is in did not arrive."""
        if rows > 0:
            self._gaps = [*self._gaps, (self.reached, rows)][-_MAX_GAPS:]

    def process(self, program: str, since: int) -> Process:
        """As a trace has it whose records begin with the step `since`: only losses that concern these count."""
        lost = sum(rows for until, rows in self._gaps if until >= since)
        return msgspec.structs.replace(process_of(self.info, 0, program, self.folder), dropped=lost)


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
        self._waiting: dict[str, list[tuple[int, pa.RecordBatch]]] = {name: [] for name in TABLES}
        self._contexts = _framed(CONTEXT).select(_KEY, pl.lit(0, dtype=pl.UInt16).alias("proc"), *CONTEXT.names)
        self._chunks: dict[str, list[pl.DataFrame]] = {name: [] for name in _ROWS}
        self._carried = self._empty("states")
        self._held = np.zeros(0, dtype=np.uint64)
        self._views = _Views(self._texts)

    @property
    def rows(self) -> int:
        """Records that are held."""
        waiting: int = sum(batch.num_rows for name in _ROWS for _, batch in self._waiting[name])
        return waiting + sum(chunk.height for chunks in self._chunks.values() for chunk in chunks)

    def member(self, name: str) -> Member:
        """The process of this name; a new one when it is not known."""
        found = self.members.get(name)
        if found is None:
            found = self.members[name] = Member(len(self._order), name)
            self._order.append(found)
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
        for table, rows in records.items():
            if table not in TABLES or not rows.schema.equals(TABLES[table]):
                raise TraceError(f"{name}: records of {table!r} do not have the columns of a trace")
        member = self.member(name)
        if info is not None:
            member.tell(info)
        for table, rows in records.items():
            batches = rows.to_batches() if isinstance(rows, pa.Table) else [rows]
            self._waiting[table] += [(member.number, batch) for batch in batches if batch.num_rows]
        if reached is not None:
            member.said = True
            member.reached = max(member.reached, reached)

    # -- codes -------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Give global codes to what came in since."""
        named, self._waiting["names"] = self._waiting["names"], []
        for number, batch in named:
            self._name(self._order[number], batch)
        taken = self._take("context")
        if taken is not None:
            keyed = taken.filter(pl.col("ctx") < _MAX_CODES).select(_KEY, "proc", *CONTEXT.names)
            self._contexts = pl.concat([self._contexts, keyed]).unique("_key", keep="last").sort("_key")
        keys, steps = self._contexts["_key"].to_numpy(), self._contexts["step"].fill_null(-1).to_numpy()
        for table, columns in _ROWS.items():
            frame = self._take(table)
            if frame is None:
                continue
            procs = frame["proc"].to_numpy()
            coded = [pl.Series(c, self._globals(kind, procs, frame[c].to_numpy())) for c, kind in columns.items()]
            frame = frame.with_columns(_KEY, *coded)
            frame = frame.with_columns(pl.Series("_step", _looked_up(keys, steps, frame["_key"].to_numpy(), -1)))
            self._chunks[table].append(frame)
            if table == "states":
                self._hold(frame)
            if table in _MARKS:
                for number, step in frame.group_by("proc").agg(pl.col("_step").max()).iter_rows():
                    self._order[number].last[table] = max(self._order[number].last[table], step)
        for member in self._order:
            if not member.said:
                member.reached = max(member.reached, min(member.last.values()))

    def _take(self, table: str) -> pl.DataFrame | None:
        waiting, self._waiting[table] = self._waiting[table], []
        if not waiting:
            return None
        frame = pl.DataFrame(pl.from_arrow(pa.concat_batches([batch for _, batch in waiting])))
        numbers = np.array([number for number, _ in waiting], dtype=np.uint16)
        procs = np.repeat(numbers, [batch.num_rows for _, batch in waiting])
        return frame.with_columns(pl.Series("proc", procs))

    def _name(self, member: Member, batch: pa.RecordBatch) -> None:
        kinds, ids, texts = (batch.column(c).to_pylist() for c in ("kind", "id", "text"))
        for kind, code, text in zip(kinds, ids, texts, strict=True):
            if kind not in Name._value2member_map_ or text is None or len(text) > MAX_NAME_CHARS or code > _MAX_CODES:
                continue
            of = Name(kind)
            index, table = self._index[of], member.codes[of]
            if code >= len(table):
                table = member.codes[of] = np.concatenate([table, np.zeros(max(code + 1, len(table)), dtype=np.uint32)])
            if text not in index:
                index[text] = len(index)
                self._texts[of].append(text)
            table[code] = index[text]

    def _globals(self, kind: Name, procs: Array, codes: Array) -> Array:
        """Global codes of local ones; those without a name become 0."""
        tables = [member.codes[kind] for member in self._order]
        if len(tables) == 1:
            return tables[0][np.where(codes < len(tables[0]), codes, 0)]
        sizes = np.array([len(table) for table in tables])
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        taken: Array = np.concatenate(tables)[starts[procs] + np.where(codes < sizes[procs], codes, 0)]
        return taken

    def _hold(self, states: pl.DataFrame) -> None:
        keys = np.unique(states["proc"].to_numpy().astype(np.uint64) << np.uint64(32) | states["var"].to_numpy())
        new = keys[~np.isin(keys, self._held, assume_unique=True)]
        if len(new):
            self._held = np.union1d(self._held, new)

    # -- windows -------------------------------------------------------------------------------------------------

    def forget(self, before: int) -> None:
        """Let go of steps before this one, the first steps aside; of their states the last of each variable stays."""
        kept = (pl.col("_step") < PROLOGUE) | (pl.col("_step") >= before)
        for table, chunks in self._chunks.items():
            if not chunks:
                continue
            whole = pl.concat(chunks)
            held = whole.filter(kept)
            if table == "states" and held.height < whole.height:
                both = pl.concat([self._carried, whole.filter(~kept)])
                self._carried = both.unique(["proc", "var"], keep="last", maintain_order=True)
            self._chunks[table] = [held]
        used = pl.col("_key").is_in(self._carried["_key"].unique().implode())
        early = (pl.col("step") < PROLOGUE) | (pl.col("step") >= before)
        self._contexts = self._contexts.filter(early.fill_null(value=True) | used)

    def window(self, window: Window, keep: int) -> Trace:
        """What is held of a window, as a trace of its own.

        Args:
            window: whose records.
            keep: no later window begins before this step, so that older ones are let go of.
        """
        self.settle()
        self.forget(min(keep, window.first) - window.reach)
        order = sorted(self._order, key=lambda m: (str(m.info.get("rank", "")).zfill(9), m.folder))
        place = np.empty(len(order), dtype=np.uint16)
        place[[member.number for member in order]] = np.arange(len(order), dtype=np.uint16)

        steps = self._contexts["step"].fill_null(-1).to_numpy()
        told = self._contexts.filter(pl.Series(window.keeps(steps) | window.before(steps), dtype=pl.Boolean))
        codes = np.arange(1, told.height + 1, dtype=np.uint32)
        keys = told["_key"].to_numpy()
        contexts = told.with_columns(pl.Series("ctx", codes), _placed(place, told)).drop("_key")

        frames: dict[str, pl.DataFrame] = {}
        for table in _ROWS:
            rows = pl.concat(self._chunks[table]) if self._chunks[table] else self._empty(table)
            of = rows["_step"].to_numpy()
            kept = window.keeps(of)
            if table == "states":
                old = rows.filter(pl.Series(~kept & window.before(of), dtype=pl.Boolean))
                carried = pl.concat([self._carried, old]).unique(["proc", "var"], keep="last", maintain_order=True)
                rows = pl.concat([carried, rows.filter(pl.Series(kept, dtype=pl.Boolean))])
            else:
                rows = rows.filter(pl.Series(kept, dtype=pl.Boolean))
            ctx = _looked_up(keys, codes, rows["_key"].to_numpy(), 0).astype(np.uint32)
            rows = rows.with_columns(_placed(place, rows), pl.Series("ctx", ctx))
            frames[table] = rows.sort("proc", "seq", maintain_order=True).select("proc", *TABLES[table].names)
        held = pl.DataFrame({"proc": place[(self._held >> np.uint64(32)).astype(np.int64)], "var": self._held.astype(np.uint32)})
        trace = Trace(
            processes=[member.process(self.program, window.first - window.reach) for member in order],
            runs=[self.run],
            calls=frames["calls"],
            states=frames["states"],
            values=frames["values"],
            contexts=contexts.select("ctx", "proc", *CONTEXT.names[1:]),
            texts=self._texts,
            held=held.sort("proc", "var"),
        )
        self._views.lend(trace)
        return trace

    def _empty(self, table: str) -> pl.DataFrame:
        coded = [pl.col(c).cast(pl.UInt32) for c in _ROWS[table]]
        frame = _framed(TABLES[table]).with_columns(pl.lit(0, dtype=pl.UInt16).alias("proc"), *coded)
        return frame.with_columns(_KEY, pl.lit(0, dtype=pl.Int32).alias("_step")).clear()


_KEY: Final = (pl.col("proc").cast(pl.UInt64) * (1 << 32) + pl.col("ctx").cast(pl.UInt64)).alias("_key")


class _Views:
    """Views of a trace's texts, which only grow: what was parsed for one window is lent to the next."""

    def __init__(self, texts: Mapping[Name, list[str]]) -> None:
        self._texts = texts
        self._functions: dict[str, int] = {}
        self._features: list[dict[str, signature.Plain]] = []
        self._variables: list[Variable] = []
        self._metas: list[dict[str, str]] = []
        self._frames: dict[str, tuple[int, pl.DataFrame]] = {}

    def lend(self, trace: Trace) -> None:
        functions, signatures = self._texts[Name.FUNCTION], self._texts[Name.SIGNATURE]
        for code in range(len(self._functions), len(functions)):
            self._functions[functions[code]] = code
        self._features += [signature.features(text) for text in signatures[len(self._features) :]]
        trace.__dict__["function_code"], trace.__dict__["features"] = self._functions, self._features
        variables, metas = self._texts[Name.VARIABLE], self._texts[Name.META]
        self._variables += [decode_variable(text) for text in variables[len(self._variables) :]]
        self._metas += [flat_meta(text) for text in metas[len(self._metas) :]]
        for view, known in (("variables", self._variables), ("metas", self._metas)):
            size, frame = self._frames.get(view, (-1, pl.DataFrame()))
            if size != len(known):
                frame = variables_frame(self._variables) if view == "variables" else metas_frame(self._metas)
                self._frames[view] = len(known), frame
            trace.__dict__[view] = frame


def _framed(schema: pa.Schema) -> pl.DataFrame:
    frame = pl.DataFrame(pl.from_arrow(pa.Table.from_batches([], schema=schema)))
    return frame.with_columns(pl.lit(0, dtype=pl.UInt16).alias("proc")) if "ctx" in frame.columns else frame


def _placed(place: Array, frame: pl.DataFrame) -> pl.Series:
    return pl.Series("proc", place[frame["proc"].to_numpy()] if frame.height else np.zeros(0, dtype=np.uint16))


def _looked_up(keys: Array, values: Array, wanted: Array, default: int) -> Array:
    """Values of sorted keys; the default where there is no such key."""
    if not len(keys):
        return np.full(len(wanted), default, dtype=np.int32)
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    found: Array = np.where(keys[at] == wanted, values[at], default).astype(np.int32)
    return found
