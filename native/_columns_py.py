"""`columns.h` in numpy: oracle of the native one, and what runs where it was not built. Four times as slow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def pack_columns(kinds: str, names: tuple[str, ...], rows: Mapping[str, Sequence[Any]] | list[tuple[Any, ...]]) -> tuple[int, tuple[int, ...], bytes]:
    """(rows, offset and size of each buffer, all buffers).

    Args:
        kinds: a letter for each column.
        names: of the columns.
        rows: columns by name, or rows.

    Raises:
        ValueError, OverflowError, TypeError: a value is not what its column holds.
    """
    columns = [rows[name] for name in names] if isinstance(rows, Mapping) else list(zip(*rows, strict=True))
    count = len(columns[0]) if columns else 0
    if not count:
        return 0, (), b""
    if len(columns) != len(names) or any(len(column) != count for column in columns):
        raise ValueError("columns differ in length")
    spans: list[int] = []
    parts: list[bytes] = []
    at = 0
    for kind, column in zip(kinds, columns, strict=True):
        for part in (b"", *_buffers(kind, column)):
            spans += (at, len(part))
            parts += (part, bytes(-len(part) % 8))
            at += len(part) + -len(part) % 8
    return count, tuple(spans), b"".join(parts)


def _buffers(kind: str, values: Sequence[Any]) -> tuple[bytes, ...]:
    if kind == "s":
        texts = [text.encode(errors="replace") for text in values]
        offsets = np.zeros(len(texts) + 1, dtype=np.int32)
        np.cumsum([len(text) for text in texts], out=offsets[1:])
        return offsets.tobytes(), b"".join(texts)
    if kind == "?":
        return (np.packbits(np.asarray(values, dtype=bool), bitorder="little").tobytes(),)
    return (np.ascontiguousarray(values, dtype=kind).tobytes(),)
