"""What one shard saw of each hypothesis: its distinct circumstances, how often each occurred, and where first.

A partial is small (training repeats itself), says everything in texts, and merges: `merge` is associative and
commutative, so shards may finish in any order and be combined in any grouping. Preconditions are found on the merge.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec
import numpy as np
import polars as pl
import pyarrow as pa
from pyarrow import ipc

from proctor.infer.preconditions.compress import COUNT, pack_fields
from proctor.invariants.condition import AGREE
from proctor.invariants.relations import Examples, Relation
from proctor.invariants.trace import Trace

PLACE: Final = "_place"  # step and sequence number of the first such example, in one number that sorts like them
RANK: Final = "_rank"  # of the first such example
SITE: Final = "_site"  # its source line
_OWN: Final = {
    "hyp": pl.UInt32(), "passed": pl.Boolean(), "run": pl.UInt32(), COUNT: pl.UInt64(), PLACE: pl.Int64(),
    RANK: pl.Int32(), SITE: pl.String(),
}  # fmt: skip
_SEQ_BITS: Final = 32


@dataclass(frozen=True)
class Partial:
    """Examples of one relation, counted.

    frame: one row a hypothesis, outcome, run and circumstance: hyp, passed, run, `COUNT`, `PLACE`, `RANK`, `SITE`, and
        the fields as in `Examples.frame`. Undecided examples are not in it.
    orders: the orders of fields that shards used.
    scope: see `Examples.scope`.
    examples: how many there were, undecided ones included.
    """

    frame: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=_OWN))
    orders: frozenset[tuple[str, ...]] = frozenset()
    scope: frozenset[str] = frozenset()
    examples: int = 0

    def of_runs(self, numbers: Sequence[int]) -> Partial:
        """The same, with these numbers of runs instead of 0, 1, 2, …"""
        known = pl.Series(numbers, dtype=pl.UInt32)
        return replace(self, frame=self.frame.with_columns(known.gather(self.frame["run"]).alias("run")))

    def to_examples(self, relation: Relation) -> Examples:
        """As an examples frame whose `proc` is the run."""
        fields = tuple(f for f in relation.arrange(self.orders) if f in self.frame.columns)
        scope = tuple(f for f in fields if f in self.scope)
        frame = self.frame.rename({"run": "proc"}).with_columns(
            (pl.col(PLACE) // (1 << _SEQ_BITS) - 1).cast(pl.Int32).alias("step"),
            (pl.col(PLACE) % (1 << _SEQ_BITS)).cast(pl.UInt32).alias("seq"),
        )
        return Examples(frame, fields, scope)


def count(examples: Examples, trace: Trace) -> Partial:
    """The partial of one shard; runs are numbered as in the trace."""
    whole = examples.frame
    frame = whole.filter(pl.col("passed").is_not_null())
    packed = pack_fields(frame, examples.fields)
    proc = frame["proc"].to_numpy().astype(np.int64)
    rank, run = (np.array(of or [0])[proc] for of in ([p.rank for p in trace.processes], [p.run for p in trace.processes]))
    narrow = pl.DataFrame(
        {
            "hyp": frame["hyp"].cast(pl.UInt32),
            "passed": frame["passed"].cast(pl.Boolean),
            "run": pl.Series(run, dtype=pl.UInt32),
            **packed.keys,
            PLACE: _places(frame),
            RANK: pl.Series(rank, dtype=pl.Int32),
            "_row": pl.Series(np.arange(frame.height, dtype=np.uint32)),
        }
    )
    keys = ["hyp", "passed", "run", *packed.keys]
    distinct = (
        narrow.sort(PLACE, RANK)
        .group_by(keys, maintain_order=True)
        .agg(pl.len().cast(pl.UInt64).alias(COUNT), pl.col(PLACE, RANK, "_row").first())
    )
    shown = [*packed.fields, *(f + AGREE for f, pair in zip(packed.fields, packed.paired) if pair)]
    rows = frame[distinct["_row"]] if distinct.height else frame.clear()
    sites = trace.sites
    codes = rows["site"].fill_null(0).to_list() if "site" in rows.columns else [0] * rows.height
    counted = distinct.select(
        "hyp",
        "passed",
        "run",
        COUNT,
        PLACE,
        RANK,
        pl.Series(SITE, [sites[c] if c < len(sites) else "" for c in codes], dtype=pl.String),
        *(rows[c].cast(pl.Boolean if c.endswith(AGREE) else pl.String) for c in shown),
    )
    return Partial(counted, frozenset({packed.fields}), frozenset(examples.scope) & set(packed.fields), whole.height)


def merge(partials: Iterable[Partial]) -> Partial:
    """One partial of many; associative and commutative up to the order of rows."""
    held = [p for p in partials if p.orders]
    if not held:
        return Partial()
    if len(held) == 1:
        return held[0]
    paired = sorted({c for p in held for c in p.frame.columns if c.endswith(AGREE)})
    frame = pl.concat([_with_agreement(p.frame, paired) for p in held], how="diagonal")
    runs = [set(p.frame["run"].unique()) for p in held]
    if sum(map(len, runs)) > len(set().union(*runs)):
        keys = [c for c in frame.columns if c not in (COUNT, PLACE, RANK, SITE)]
        firsts = pl.col(PLACE, RANK, SITE).first()
        grouped = frame.sort(PLACE, RANK, SITE).group_by(keys, maintain_order=True).agg(pl.col(COUNT).sum(), firsts)
        frame = grouped.select(frame.columns)
    return Partial(
        frame,
        frozenset().union(*(p.orders for p in held)),
        frozenset().union(*(p.scope for p in held)),
        sum(p.examples for p in held),
    )


def _places(frame: pl.DataFrame) -> pl.Series:
    blank = pl.lit(0, dtype=pl.Int64)
    step = pl.col("step").cast(pl.Int64).fill_null(-1) + 1 if "step" in frame.columns else blank
    seq = pl.col("seq").cast(pl.Int64).fill_null(0) if "seq" in frame.columns else blank
    return frame.with_columns((step * (1 << _SEQ_BITS) + seq).alias(PLACE))[PLACE]


def _with_agreement(frame: pl.DataFrame, paired: Sequence[str]) -> pl.DataFrame:
    """A field that no record of a shard has is not set in any: they agree on that."""
    missing = [c for c in paired if c not in frame.columns and c.removesuffix(AGREE) not in frame.columns]
    return frame.with_columns(pl.lit(value=True).alias(c) for c in missing)


# -- on disk ---------------------------------------------------------------------------------------------------------


class _Head(msgspec.Struct, frozen=True):
    orders: list[list[str]]
    scope: list[str]
    examples: int


def encode(partial: Partial, more: Mapping[str, bytes]) -> bytes:
    """As an Arrow file that says what it is, and `more`, in its schema."""
    head = _Head(sorted(map(list, partial.orders)), sorted(partial.scope), partial.examples)
    return encode_frame(partial.frame, {"partial": msgspec.json.encode(head), **more})


def decode(blob: bytes) -> Partial:
    """Inverse of `encode`.

    Raises:
        ValueError: not such a file.
    """
    frame, said = decode_frame(blob)
    try:
        head = msgspec.json.decode(said["partial"], type=_Head)
    except (KeyError, msgspec.MsgspecError) as e:
        raise ValueError(f"not a partial: {e}") from None
    if any(frame.schema.get(name) != dtype for name, dtype in _OWN.items()):
        raise ValueError("not a partial: other columns")
    return Partial(frame, frozenset(map(tuple, head.orders)), frozenset(head.scope), head.examples)


def encode_frame(frame: pl.DataFrame, said: Mapping[str, bytes]) -> bytes:
    table = frame.to_arrow(compat_level=pl.CompatLevel.oldest())
    table = table.replace_schema_metadata({k.encode(): v for k, v in said.items()})
    sink = io.BytesIO()
    with ipc.new_file(sink, table.schema, options=ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    return sink.getvalue()


def decode_frame(blob: bytes) -> tuple[pl.DataFrame, dict[str, bytes]]:
    """Inverse of `encode_frame`.

    Raises:
        ValueError: not an Arrow file.
    """
    try:
        table = ipc.open_file(pa.BufferReader(blob)).read_all()
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as e:
        raise ValueError(f"not an Arrow file: {e}") from None
    said = {k.decode(): v for k, v in (table.schema.metadata or {}).items()}
    return pl.DataFrame(pl.from_arrow(table.replace_schema_metadata(None))), said
