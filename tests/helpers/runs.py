"""Write small run directories from plain rows, exactly as `invariants.schema` lays them out.

    write_run(tmp_path / "run", processes=[
        {"rank": 0, "world": 2,
         "calls": [{"fn": "torch.optim.Optimizer.step", "step": 0, "site": "train.py:7", "args": {"a": [], "k": {}}}],
         "states": [{"var": {"name": "fc.weight", "attr": "data"}, "step": 0, "fp": 17, "meta": {"dtype": "float32"}}]},
    ])

Names are interned, sequence numbers and clocks are filled in, and every context key of a row (`step`, `phase`, …)
goes into the context table. A signature is given as its JSON tree or as text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import ipc

from proctor.invariants.schema import CALLS, CONTEXT, NAMES, STATES, TRACE_SCHEMA, VALUES, Name, Value

Row = Mapping[str, Any]

_CONTEXT: dict[str, Any] = {
    "step": 0,
    "micro": 0,
    "phase": "train",
    "grad": True,
    "autocast": "",
    "outer": "",
    "recompute": False,
    "meta": "",
}
_VARIABLE = {"model": "Model", "name": "", "attr": "data", "role": "parameter", "module": "", "kind": "", "position": "", "alias": ""}


def write_run(
    path: Path,
    processes: Sequence[Row],
    *,
    program: str = "train.py",
    command: Sequence[str] = ("python", "train.py"),
    schema: int = TRACE_SCHEMA,
    **info: Any,
) -> Path:
    """Write one run; returns its path.

    Args:
        path: the directory to make.
        processes: mappings with `calls`, `states` and `values` (rows), and any of rank, world, pid, coords, dropped, notes,
            finished (default: true), open and clock (calls that did not return), restart, blind, context (rows without a record, to extend the steps).
        program: what preconditions and support count as one program.
        command: the user's command.
        schema: trace schema number to claim.
        info: more keys of run.json.
    """
    path.mkdir(parents=True)
    head = {"schema": schema, "program": program, "command": list(command), "started": 1_750_000_000.0, **info}
    (path / "run.json").write_text(json.dumps(head))
    for i, process in enumerate(processes):
        rank, pid = process.get("rank", i), process.get("pid", 1000 + i)
        folder = path / "procs" / f"{rank}-{pid}"
        folder.mkdir(parents=True)
        facts = {
            "rank": rank,
            "world": process.get("world", len(processes)),
            "pid": pid,
            "coords": process.get("coords", {}),
            "dropped": process.get("dropped", 0),
            "notes": process.get("notes", []),
            "finished": process.get("finished", True),
            **{key: process[key] for key in ("open", "clock", "unobserved", "restart", "definitions", "blind") if key in process},
        }
        (folder / "process.json").write_text(json.dumps(facts))
        _Tables(folder).write(process)
    return path


class _Tables:
    """Interns the names of one process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.codes: dict[Name, dict[str, int]] = {kind: {"": 0} for kind in Name}
        self.contexts: dict[tuple[Any, ...], int] = {}

    def write(self, process: Row) -> None:
        calls = [self._call(i, row) for i, row in enumerate(process.get("calls", ()), start=1)]
        states = [self._state(row) for row in process.get("states", ())]
        values = [self._value(row) for row in process.get("values", ())]
        for row in process.get("context", ()):
            self._context(row)
        context = [dict(zip(_CONTEXT, key), ctx=code) for key, code in self.contexts.items()]
        names = [
            {"kind": int(kind), "id": code, "text": text}
            for kind, table in self.codes.items()
            for text, code in table.items()
            if code
        ]
        for name, schema, rows in (
            ("calls", CALLS, calls),
            ("states", STATES, states),
            ("values", VALUES, values),
            ("context", CONTEXT, context),
            ("names", NAMES, names),
        ):
            write_table(self.folder / f"{name}.arrow", schema, rows)

    def _code(self, kind: Name, value: Any) -> int:
        text = value if isinstance(value, str) else "" if value is None else json.dumps(value, separators=(",", ":"))
        table = self.codes[kind]
        return table.setdefault(text, len(table))

    def _context(self, row: Row) -> int:
        given = {k: row.get(k, default) for k, default in _CONTEXT.items()}
        given["meta"] = _text(row.get("user_meta", ""))  # `meta` of a state row is the variable's
        key = tuple(given.values())
        return self.contexts.setdefault(key, len(self.contexts) + 1)

    def _call(self, i: int, row: Row) -> dict[str, Any]:
        return {
            "seq": row.get("seq", i),
            "parent": row.get("parent", 0),
            "fn": self._code(Name.FUNCTION, row["fn"]),
            "site": self._code(Name.SITE, row.get("site", "")),
            "ctx": self._context(row),
            "args": self._code(Name.SIGNATURE, row.get("args", {"a": [], "k": {}})),
            "ret": self._code(Name.SIGNATURE, row.get("ret", "null")),
            "t": row.get("t", 1_000_000 * i),
            "dur": row.get("dur", 500_000),
            "flags": row.get("flags", 0),
        }

    def _state(self, row: Row) -> dict[str, Any]:
        var = row["var"]
        full = var if isinstance(var, str) else {**_VARIABLE, **var}
        return {
            "seq": row.get("seq", 0),
            "call": row.get("call", 0),
            "edge": row.get("edge", 1),
            "ctx": self._context(row),
            "var": self._code(Name.VARIABLE, full),
            "meta": self._code(Name.META, row.get("meta", {})),
            "fp": row.get("fp", 0),
            "norm": row.get("norm", float("nan")),
            "flags": row.get("flags", 0),
        }

    def _value(self, row: Row) -> dict[str, Any]:
        return {
            "seq": row.get("seq", 0),
            "ctx": self._context(row),
            "kind": int(Value[row["kind"].upper()]),
            "place": self._code(Name.PLACE, row.get("place", "0")),
            "item": row.get("item", -1),
            "meta": self._code(Name.META, row.get("meta", "")),
            "fp": row.get("fp", 0),
            "norm": row.get("norm", float("nan")),
            "number": row.get("number", float("nan")),
            "flags": row.get("flags", 0),
        }


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def write_table(path: Path, schema: pa.Schema, rows: Sequence[Row], batch: int = 100_000) -> None:
    """One Arrow stream, zstd, in batches of `batch` rows."""
    options = ipc.IpcWriteOptions(compression="zstd")
    with pa.OSFile(str(path), "wb") as sink, ipc.new_stream(sink, schema, options=options) as writer:
        for start in range(0, len(rows), batch):
            writer.write_batch(pa.RecordBatch.from_pylist([dict(r) for r in rows[start : start + batch]], schema=schema))
