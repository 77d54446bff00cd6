"""`columns.h` in numpy: oracle of the native one, and what runs where it was not built. Four times as slow."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Rows = Mapping[str, Sequence[Any]] | list[tuple[Any, ...]]


class Packer:
    """Messages of one table: the bytes before the buffers as a template, into which the numbers of some rows are put.

    Args:
        kinds: a letter for each column.
        names: of the columns.
        head: the template.
        places: in it, of the bytes after it, of the number of rows, of the columns' nodes and of the buffers' spans.
    """

    def __init__(self, kinds: str, names: tuple[str, ...], head: bytes, places: tuple[int, int, int, int]) -> None:
        if len(names) != len(kinds) or not kinds:
            raise ValueError("as many names as kinds, at least one")
        sizes = (8, 8, 16 * len(kinds), 16 * sum(3 if kind == "s" else 2 for kind in kinds))
        if any(place < 0 or place + size > len(head) for place, size in zip(places, sizes, strict=True)):
            raise ValueError("a place outside of the head")
        self._kinds, self._names, self._head, self._places = kinds, names, head, places

    def pack(self, rows: Rows) -> tuple[int, bytes] | None:
        """(rows, message) of a dict of columns or a list of tuples; None when there are none.

        Raises:
            ValueError, OverflowError, TypeError: a value is not what its column holds.
        """
        columns = [rows[name] for name in self._names] if isinstance(rows, Mapping) else list(zip(*rows, strict=True))
        count = len(columns[0]) if columns else 0
        if not count:
            return None
        if len(columns) != len(self._names) or any(len(column) != count for column in columns):
            raise ValueError("columns differ in length")
        spans: list[int] = []
        parts: list[bytes] = []
        at = 0
        for kind, column in zip(self._kinds, columns, strict=True):
            for part in (b"", *_buffers(kind, column)):
                spans += (at, len(part))
                parts += (part, bytes(-len(part) % 8))
                at += len(part) + -len(part) % 8
        head = bytearray(self._head)
        for place, numbers in zip(self._places, ((at,), (count,), (count, 0) * len(columns), spans), strict=True):
            struct.pack_into(f"<{len(numbers)}q", head, place, *numbers)
        return count, b"".join((head, *parts))


def pack_tables(packers: Mapping[str, Packer], tables: Mapping[str, Rows]) -> list[tuple[str, int, bytes]]:
    """(table, rows, message) of each table that has rows."""
    made = [(table, packers[table].pack(rows)) for table, rows in tables.items()]
    return [(table, *found) for table, found in made if found is not None]


def _buffers(kind: str, values: Sequence[Any]) -> tuple[bytes, ...]:
    if kind == "s":
        texts = [text.encode(errors="replace") for text in values]
        offsets = np.zeros(len(texts) + 1, dtype=np.int32)
        np.cumsum([len(text) for text in texts], out=offsets[1:])
        return offsets.tobytes(), b"".join(texts)
    if kind == "?":
        return (np.packbits(np.asarray(values, dtype=bool), bitorder="little").tobytes(),)
    return (np.ascontiguousarray(values, dtype=kind).tobytes(),)
