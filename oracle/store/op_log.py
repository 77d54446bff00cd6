"""The operations of one module, as a rank wrote them (`collect/edges/ops.py`), for who looks for the wrong one (`localising/ops.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from proctor.errors import OracleError
from proctor.invariants.files import UNREADABLE, read_file

FILE: Final = "ops.json"
MAX_FILE_BYTES: Final = 64 * 1024 * 1024


class Op(msgspec.Struct, frozen=True):
    """An operation, or an edge of the module.

    Attributes:
        number: its place in the list.
        what: `op`; `source`, a value that comes into the module's own code, or `sink`, one that leaves it.
        phase: `forward` or `backward`.
        label: of an operation, such as `aten.addmm`.
        source: `file:line` of the user's code.
        inputs: operations whose results it reads.
        shapes: of its results.
        kind, name, slot: of an edge.
        call: of the module.
    """

    number: int
    what: str
    phase: str
    label: str
    source: str
    inputs: list[int]
    shapes: list[list[int]]
    kind: str
    name: str
    slot: str
    call: int


class OpLog(msgspec.Struct):
    """What a rank wrote.

    Attributes:
        ops: in the order in which they ran.
        truncated: there were too many.
        error: why recording stopped, "" if it did not.
    """

    ops: list[Op]
    truncated: bool
    error: str


def read_log(path: Path) -> OpLog:
    """Read the operations of a rank; an empty list where none were recorded.

    Raises:
        OracleError: damaged or too large.
    """
    try:
        found = msgspec.json.decode(read_file(path, MAX_FILE_BYTES), type=OpLog)
    except FileNotFoundError:
        return OpLog([], False, "")
    except OSError as e:
        raise OracleError(f"{path}: {e.strerror or e}", hint="record it again") from None
    except UNREADABLE as e:
        raise OracleError(f"{path}: {e}", hint="record it again") from None
    if any(op.number != i or any(not 0 <= j < i for j in op.inputs) for i, op in enumerate(found.ops)):
        raise OracleError(f"{path}: its operations do not follow one another", hint="record it again")
    return found
