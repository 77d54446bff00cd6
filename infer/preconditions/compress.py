"""Which distinct circumstances did each hypothesis meet? One group-by turns examples into integer codes with counts.

Training repeats itself, so a million examples are a few thousand distinct rows. Every column becomes dense codes in
the order of its texts; the codes of a row are packed into as few 64-bit words as they need, and the rows are
grouped on those words. All later work is on distinct rows, sorted, so that nothing depends on row order.

A frame may be a count of examples already (`COUNT`), as partials of shards are.

Legend: N distinct rows, K fields, W words, M rows distinct also by process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import polars as pl

from proctor.invariants.condition import AGREE
from proctor.invariants.relations import Examples

Array = np.ndarray[Any, Any]

COUNT: Final = "_count"  # column: examples behind a row; one without it
UNSET = 0  # code of null
UNSURE, DIFFERS, AGREES = 0, 1, 2  # codes of `<field>~`: null, false, true
_WORD_BITS = 64


@dataclass(frozen=True)
class Circumstances:
    """Distinct rows of an examples frame, sorted by hypothesis."""

    fields: tuple[str, ...]
    values: list[list[str]]  # by field: text of code 1, 2, …
    hyp_N: Array
    passed_N: Array
    count_N: Array  # examples behind each row
    contradicted_N: Array  # the same circumstances both passed and failed
    codes_NK: Array
    agree_NK: Array  # UNSURE, DIFFERS, AGREES; all UNSURE where `paired` is false
    paired: tuple[bool, ...]  # by field: examples have several records, `<field>~` exists
    row_M: Array  # distinct row of each (row, process)
    proc_M: Array
    count_M: Array

    def only(self, keep_M: Array) -> Circumstances:
        """As if only these of the (row, process) pairs had been seen."""
        count_N = np.bincount(self.row_M[keep_M], weights=self.count_M[keep_M], minlength=len(self.hyp_N))
        kept = count_N > 0
        partner = np.where(self.passed_N, -1, 1) + np.arange(len(kept))  # a row that failed stands before its twin
        twin = self.contradicted_N & kept[np.clip(partner, 0, max(len(kept) - 1, 0))]
        index = np.cumsum(kept) - 1
        return Circumstances(
            fields=self.fields,
            values=self.values,
            hyp_N=self.hyp_N[kept],
            passed_N=self.passed_N[kept],
            count_N=count_N[kept].astype(np.int64),
            contradicted_N=twin[kept],
            codes_NK=self.codes_NK[kept],
            agree_NK=self.agree_NK[kept],
            paired=self.paired,
            row_M=index[self.row_M[keep_M]],
            proc_M=self.proc_M[keep_M],
            count_M=self.count_M[keep_M],
        )

    def slices(self) -> tuple[Array, Array, Array]:
        """Hypotheses in order, and the range of rows of each."""
        if not len(self.hyp_N):
            empty = np.zeros(0, dtype=np.int64)
            return empty, empty, empty
        start = np.flatnonzero(np.r_[True, self.hyp_N[1:] != self.hyp_N[:-1]])
        return self.hyp_N[start], start, np.r_[start[1:], len(self.hyp_N)]


class _Packer:
    """Packs columns of small codes into 64-bit words."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.words: list[Array] = []
        self.places: list[tuple[int, int, int]] = []  # of each column: word, first bit, number of bits
        self._used = _WORD_BITS

    def add(self, codes: Array, states: int) -> None:
        if states <= 1:  # never set: nothing to store
            self.places.append((0, 0, 0))
            return
        bits = (states - 1).bit_length()
        if self._used + bits > _WORD_BITS:
            self.words.append(np.zeros(self.rows, dtype=np.uint64))
            self._used = 0
        self.words[-1] |= codes.astype(np.uint64) << np.uint64(self._used)
        self.places.append((len(self.words) - 1, self._used, bits))
        self._used += bits

    def column(self, index: int, words: list[Array]) -> Array:
        word, shift, bits = self.places[index]
        unpacked = np.zeros(1, dtype=np.int32)  # never set: broadcasts
        if bits:
            unpacked = ((words[word] >> np.uint64(shift)) & np.uint64((1 << bits) - 1)).astype(np.int32)
        return unpacked


@dataclass(frozen=True)
class Packed:
    """The fields of a frame as few words."""

    fields: tuple[str, ...]
    values: list[list[str]]  # by field: text of code 1, 2, …
    paired: tuple[bool, ...]
    packer: _Packer

    @property
    def keys(self) -> dict[str, pl.Series]:
        return {f"w{i}": pl.Series(word) for i, word in enumerate(self.packer.words)}


def pack_fields(frame: pl.DataFrame, names: Sequence[str]) -> Packed:
    """Encode the fields of a frame, those of these names that it has."""
    fields = tuple(f for f in dict.fromkeys(names) if f in frame.columns)
    values: list[list[str]] = []
    packer = _Packer(frame.height)
    for name in fields:
        codes, texts = _encode(frame[name])
        packer.add(codes, len(texts) + 1)
        values.append(texts)
    paired = tuple(f + AGREE in frame.columns for f in fields)
    for name, pair in zip(fields, paired):
        if pair:
            agree = frame[name + AGREE].cast(pl.Boolean)
            packer.add((agree.cast(pl.UInt8) + 1).fill_null(UNSURE).to_numpy(), 3)
    return Packed(fields, values, paired, packer)


def compress(examples: Examples) -> Circumstances:
    """Group identical examples of each hypothesis; examples that could not be decided are left out."""
    frame = examples.frame.filter(pl.col("passed").is_not_null())
    packed = pack_fields(frame, examples.fields)
    fields, values, paired, packer = packed.fields, packed.values, packed.paired, packed.packer
    keys = list(packed.keys)
    narrow = pl.DataFrame(
        {
            "hyp": frame["hyp"].cast(pl.UInt32),
            **packed.keys,
            "passed": frame["passed"].cast(pl.Boolean),
            "proc": frame["proc"],
        }
    )
    everything = ["hyp", *keys, "passed", "proc"]
    size = pl.len()
    if COUNT in frame.columns:
        narrow = narrow.with_columns(frame[COUNT])
        size = pl.col(COUNT).sum()
    fine = narrow.group_by(everything).agg(size.alias("count")).sort(everything)

    hyp = fine["hyp"].to_numpy().astype(np.int64)
    passed = fine["passed"].to_numpy()
    words = [fine[key].to_numpy() for key in keys]
    new_place = _changes([hyp, *words])
    new_row = new_place | _changes([passed])
    start = np.flatnonzero(new_row)
    words = [w[start] for w in words]
    place = np.cumsum(new_place)[start]
    twin = np.zeros(len(start), dtype=bool)
    twin[1:] = place[1:] == place[:-1]
    twin[:-1] |= twin[1:].copy()

    codes_NK = np.zeros((len(start), len(fields)), dtype=np.int32)
    agree_NK = np.zeros((len(start), len(fields)), dtype=np.int8)
    for k in range(len(fields)):
        codes_NK[:, k] = packer.column(k, words)
    for at, k in enumerate(np.flatnonzero(paired).tolist()):
        agree_NK[:, k] = packer.column(len(fields) + at, words)
    counts = fine["count"].to_numpy().astype(np.int64)
    return Circumstances(
        fields=fields,
        values=values,
        hyp_N=hyp[start],
        passed_N=passed[start],
        count_N=np.add.reduceat(counts, start) if len(start) else counts,
        contradicted_N=twin,
        codes_NK=codes_NK,
        agree_NK=agree_NK,
        paired=paired,
        row_M=np.cumsum(new_row) - 1,
        proc_M=fine["proc"].to_numpy().astype(np.int64),
        count_M=counts,
    )


def _encode(column: pl.Series) -> tuple[Array, list[str]]:
    """Dense codes in the order of the texts; 0 is null."""
    if column.dtype not in (pl.String, pl.Categorical, pl.Enum):
        column = column.cast(pl.String)
    texts = column.unique().drop_nulls().cast(pl.String).sort().to_list()
    if not texts:
        return np.zeros(len(column), dtype=np.uint8), texts
    codes = column.cast(pl.Enum(texts)).to_physical()
    return (codes.cast(pl.UInt32) + 1).fill_null(UNSET).to_numpy(), texts


def _changes(columns: list[Array]) -> Array:
    """True where a row differs from the one before in any column; true for the first."""
    changed = np.zeros(len(columns[0]), dtype=bool)
    changed[:1] = True
    for column in columns:
        changed[1:] |= column[1:] != column[:-1]
    return changed
