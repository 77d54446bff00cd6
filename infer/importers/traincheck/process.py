"""Writes one process of an imported run: our tables, and TrainCheck's records beside them.

Rows are written in batches, texts once each as far as a bounded memory of them reaches.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyarrow import ipc

from proctor.infer.importers.traincheck import leaves
from proctor.infer.importers.traincheck.files import Line
from proctor.invariants.relations.traincheck.tables import (
    NO_STEP,
    RECORDS,
    RECORDS_FILE,
    STAGE,
    STEP,
    TEXTS,
    TEXTS_FILE,
    Record,
)
from proctor.invariants.schema import MAX_NAME_CHARS, TABLES, CallFlag, Name, StateFlag

_BATCH: Final = 20_000  # rows
_TEXT_BATCH: Final = 8 << 20  # characters
_REMEMBERED: Final = 32 << 20  # characters of texts that are written once only
_MAX_OPEN: Final = 100_000  # calls that have not returned yet
_PHASES: Final = {
    "init": "init",
    "preprocessing": "init",
    "training": "train",
    "evaluation": "eval",
    "testing": "eval",
    "inference": "eval",
    "postprocessing": "eval",
    "checkpointing": "checkpoint",
}
# Fields of a record that have a column of their own, or say nothing of it.
_OWN: Final = frozenset(
    """func_call_id thread_id process_id time type function obj_id args kwargs return_values exception exception_msg
    var_name var_type attributes stack_trace""".split()
)
_ENCODER: Final = json.JSONEncoder(separators=(",", ":"))  # one for all: making it costs more than a small object
_RANKS: Final = {
    "meta_vars._DATA_PARALLEL_RANK": "dp",
    "meta_vars._TENSOR_MODEL_PARALLEL_RANK": "tp",
    "meta_vars._PIPELINE_MODEL_PARALLEL_RANK": "pp",
}


class _Open(NamedTuple):
    """A call that has not returned."""

    seq: int
    parent: int
    function: int
    context: int
    args: int
    start: int
    text: int  # code of the function among TrainCheck's texts


class Table:
    """An Arrow stream that is written in batches."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._sink = pa.OSFile(str(path), "wb")
        self._writer = ipc.new_stream(self._sink, schema, options=ipc.IpcWriteOptions(compression="zstd"))
        self._schema = schema
        self._rows: list[tuple[Any, ...]] = []

    def add(self, *row: Any) -> None:
        self._rows.append(row)
        if len(self._rows) >= _BATCH:
            self.flush()

    def flush(self) -> None:
        if self._rows:
            columns = [pa.array(c, type=f.type) for c, f in zip(zip(*self._rows, strict=True), self._schema, strict=True)]
            self._writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=self._schema))
            self._rows.clear()

    def close(self) -> None:
        self.flush()
        self._writer.close()
        self._sink.close()


class Texts:
    """Codes of texts; a text may get a second code when the memory of earlier ones was full."""

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}
        self._size = 0
        self._next = 1

    def code(self, key: Any, text: str) -> tuple[int, bool]:
        """The code of a text, and whether it is new. Codes begin at 1."""
        known = self._known.get(key)
        if known is not None:
            return known, False
        if self._size > _REMEMBERED:
            self._known.clear()
            self._size = 0
        code = self._next
        self._next += 1
        self._known[key] = code
        self._size += len(text) + 64
        return code, True


class ProcessWriter:
    """Everything that one process left."""

    def __init__(self, folder: Path, pid: int) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.pid = pid
        self.ranks: dict[str, int] = {}
        self.unmatched = 0  # ends of calls that no beginning was read of
        self._tables = {name: Table(folder / f"{name}.arrow", schema) for name, schema in TABLES.items()}
        self._records = Table(folder / RECORDS_FILE, RECORDS)
        self._texts_table = Table(folder / TEXTS_FILE, TEXTS)
        self._texts_size = 0
        self._texts, self._names = Texts(), Texts()
        self._functions: dict[str, int] = {}
        self._seq = 0
        self._open: dict[str, _Open] = {}
        self._stacks: dict[int, list[int]] = {}
        self._metas: dict[int, tuple[int, int]] = {}
        self._last: dict[tuple[str, str], tuple[int, int, int]] = {}

    @property
    def unreturned(self) -> int:
        """Calls whose end was not read."""
        return len(self._open)

    def add(self, line: Line) -> None:
        if line.kind == Record.PRE:
            self._begin(line)
        elif line.kind == Record.STATE:
            self._state(line)
        else:
            self._end(line)

    def close(self) -> None:
        for table in (*self._tables.values(), self._records, self._texts_table):
            table.close()

    # -- calls --------------------------------------------------------------------------------------------

    def _begin(self, line: Line) -> None:
        record = line.record
        call, name = str(record["func_call_id"]), record["function"]
        if call in self._open or len(self._open) >= _MAX_OPEN:
            self.unmatched += 1
            return
        self._seq += 1
        meta, step, context = self._meta(record)
        given = {k: record[k] for k in ("args", "kwargs") if isinstance(record.get(k), dict)}
        text = self._function(name)
        stack = self._stacks.setdefault(line.thread, [])
        parent = stack[-1] if stack else 0
        signature = _dumps(leaves.arguments(given.get("args"), given.get("kwargs")))
        self._open[call] = _Open(
            self._seq, parent, self._name(Name.FUNCTION, name), context, self._name(Name.SIGNATURE, signature), line.time, text
        )
        stack.append(self._seq)
        self._record(line, self._seq, step, text, meta, self._text(_dumps(given)))

    def _end(self, line: Line) -> None:
        record = line.record
        call = self._open.pop(str(record["func_call_id"]), None)
        if call is None:
            self.unmatched += 1
            return
        stack = self._stacks.get(line.thread, [])
        if call.seq in stack:
            del stack[stack.index(call.seq) :]
        raised = line.kind == Record.RAISED
        outcome = {k: record[k] for k in ("return_values", "exception") if k in record and not _is_nan(record[k])}
        ret = _dumps(leaves.result(outcome["return_values"])) if "return_values" in outcome else ""
        self._tables["calls"].add(
            call.seq,
            call.parent,
            call.function,
            0,
            call.context,
            call.args,
            self._name(Name.SIGNATURE, ret),
            call.start,
            max(line.time - call.start, 0),
            int(CallFlag.RAISED) if raised else 0,
        )
        self._record(line, call.seq, NO_STEP, call.text, 0, self._text(_dumps(outcome)))

    # -- variables ----------------------------------------------------------------------------------------

    def _state(self, line: Line) -> None:
        record = line.record
        attributes = dict(_flat(record["attributes"], ""))
        meta, step, context = self._meta(record)
        variable = self._text(_dumps([record["var_name"], str(record.get("var_type", ""))]))
        self._record(line, self._seq, step, variable, meta, self._text(_dumps(attributes)))
        for attr in ("data", "grad"):
            if attr in attributes and not _is_nan(attributes[attr]):
                self._change(record, attr, attributes, context)

    def _change(self, record: Mapping[str, Any], attr: str, attributes: Mapping[str, Any], context: int) -> None:
        model, _, name = str(record["var_name"]).partition(".")
        flags, fingerprint = _fingerprint(attributes[attr])
        meta = self._name(
            Name.META,
            _dumps(
                {
                    "dtype": leaves.dtype(attributes.get("dtype", "")),
                    "shape": leaves.shape(attributes.get("shape")),
                    "requires_grad": attributes.get("requires_grad") is True,
                }
            ),
        )
        key = (str(record["var_name"]), attr)
        if self._last.get(key) == (fingerprint, flags, meta):
            return
        self._last[key] = fingerprint, flags, meta
        role = "parameter" if "Parameter" in str(record.get("var_type", "")) else "buffer"
        variable = {
            "model": model[:MAX_NAME_CHARS],
            "name": name or model,
            "attr": attr,
            "role": role,
            "kind": name.rpartition(".")[2] or model,
        }
        code = self._name(Name.VARIABLE, _dumps(variable))
        self._tables["states"].add(self._seq, 0, 1, context, code, meta, fingerprint, math.nan, flags)

    # -- shared -------------------------------------------------------------------------------------------

    def _record(self, line: Line, seq: int, step: int, name: int, meta: int, body: int) -> None:
        address = line.record.get("obj_id")
        known = isinstance(address, int) and not isinstance(address, bool) and -(1 << 63) <= address < 1 << 63
        self._records.add(
            line.kind, line.file, line.line, line.time, line.thread, seq, step, name, meta, body, address if known else None
        )

    def _meta(self, record: Mapping[str, Any]) -> tuple[int, int, int]:
        """Code of a record's other plain fields, its step, and its context."""
        fields = {
            k: v
            for key, value in record.items()
            if key not in _OWN
            for k, v in _flat({key: value}, "")
            if not isinstance(v, (list, dict)) and not _is_nan(v)
        }
        code = self._text(_dumps(fields))
        if code not in self._metas:
            if len(self._metas) > _BATCH:
                self._metas.clear()
            self._metas[code] = self._context(fields)
            for field, axis in _RANKS.items():
                rank = _rank(fields.get(field))
                if rank is not None:
                    self.ranks[axis] = rank
        step, context = self._metas[code]
        return code, step, context

    def _context(self, fields: Mapping[str, Any]) -> tuple[int, int]:
        step = fields.get(STEP)
        if isinstance(step, float) and step.is_integer():
            step = int(step)
        known = isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 1 << 31
        number = int(step) if known and step is not None else NO_STEP
        phase = _PHASES.get(str(fields.get(STAGE)), "train" if known else "init")
        own = {k.removeprefix("meta_vars."): v for k, v in fields.items() if k.startswith("meta_vars.") and k != STEP}
        text = _dumps(own) if own else ""
        code, new = self._names.code(("context", number, phase, text), text)
        if new:
            self._tables["context"].add(code, number, 0, phase, True, "", "", False, text)
        return number, code

    def _function(self, name: str) -> int:
        if name not in self._functions:
            self._functions[name] = self._text(name)
        return self._functions[name]

    def _text(self, text: str) -> int:
        code, new = self._texts.code(text, text)
        if new:
            self._texts_table.add(code, text)
            self._texts_size += len(text)
            if self._texts_size > _TEXT_BATCH:
                self._texts_table.flush()
                self._texts_size = 0
        return code

    def _name(self, kind: Name, text: str) -> int:
        if not text:
            return 0
        code, new = self._names.code((kind, text), text)
        if new:
            self._tables["names"].add(int(kind), code, text[:MAX_NAME_CHARS])
        return code


def _flat(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Nested objects as `outer.inner`, as TrainCheck names them."""
    for key, value in tree.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, dict) and value:
            yield from _flat(value, name)
        else:
            yield name, value


def _fingerprint(value: Any) -> tuple[int, int]:
    """Flags and a hash: TrainCheck's own of 64 bits, or one of what it wrote instead."""
    if value is None:
        return int(StateFlag.NONE), 0
    if isinstance(value, int) and not isinstance(value, bool):
        return 0, value & 0xFFFF_FFFF_FFFF_FFFF
    return 0, int.from_bytes(hashlib.blake2b(_dumps(value).encode(errors="replace"), digest_size=8).digest(), "little")


def _rank(value: Any) -> int | None:
    text = str(value)
    return int(text) if text.isdigit() and len(text) < 7 else None


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _dumps(tree: Any) -> str:
    """Compact JSON that Arrow can hold: lone surrogates stay escaped."""
    return _ENCODER.encode(tree)


