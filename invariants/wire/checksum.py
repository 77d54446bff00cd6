"""Checksums of the batches of a trace: over a batch's rows before they are compressed, and over the number of its first row where that is written.

Called by whoever writes a batch (`instrument/record/writer`) and whoever reads one (`trace/tables`, `verify/transport/fill`); without polars, which a rank
does not load.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Final

import pyarrow as pa

AT: Final = b"at"  # keys of a batch's metadata: number of its first row
CHECKSUM: Final = b"crc32"


def checksum(batch: pa.RecordBatch, at: int | None) -> bytes:
    """Of a batch, and the number of its first row where that is written."""
    return b"%08x" % zlib.crc32(b"" if at is None else b"%d" % at, zlib.crc32(batch.serialize()))


def metadata(batch: pa.RecordBatch, at: int | None) -> dict[bytes, bytes]:
    """What a batch is written with."""
    first = {} if at is None else {AT: b"%d" % at}
    return {**first, CHECKSUM: checksum(batch, at)}


def is_sound(batch: pa.RecordBatch, said: Mapping[bytes, bytes] | None) -> bool:
    """Whether a batch is as it was written; of an earlier version's nobody knows."""
    wanted = None if said is None else said.get(CHECKSUM)
    if said is None or wanted is None:
        return True
    first = said.get(AT)
    if first is not None and not first.isdigit():
        return False
    return checksum(batch, None if first is None else int(first)) == wanted
