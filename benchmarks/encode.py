"""What it costs to make a flush's records into bytes: by numbers put into known metadata, against building and serialising Arrow arrays.

    python benchmarks/encode.py [--rows 60] [--rounds 2000]
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import pyarrow as pa

from proctor.invariants.schema import TABLES
from proctor.invariants.wire.arrow_message import Encoded, TableEncoder


def rows_of(schema: pa.Schema, count: int, columns: bool) -> Any:
    """Some rows as the recorder gives them: a dict of arrays, or a list of tuples."""
    plain = {name: np.arange(count, dtype=kind.to_pandas_dtype()) for name, kind in zip(schema.names, schema.types, strict=True) if not pa.types.is_string(kind)}
    if columns:
        return plain
    values = [plain[name].tolist() if name in plain else [f"text {i}" for i in range(count)] for name in schema.names]
    return list(zip(*values, strict=True))


def by_arrow(schema: pa.Schema, rows: Any) -> Encoded:
    columns = [rows[name] for name in schema.names] if isinstance(rows, dict) else list(zip(*rows, strict=True))
    return Encoded.of(pa.RecordBatch.from_arrays([pa.array(c, type=t) for c, t in zip(columns, schema.types, strict=True)], schema=schema))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=2000)
    args = parser.parse_args()
    flush = {"calls": args.rows, "states": args.rows, "values": max(1, args.rows // 6), "context": 2, "names": 1}
    made = {table: rows_of(schema, flush[table], table == "calls") for table, schema in TABLES.items()}
    encoder = TableEncoder(TABLES)
    ratios, ours = [], []
    for _ in range(args.rounds):
        begin = time.perf_counter()
        encoder.encode(made)
        middle = time.perf_counter()
        for table, rows in made.items():
            by_arrow(TABLES[table], rows)
        ours.append(middle - begin)
        ratios.append((time.perf_counter() - middle) / (middle - begin))
    print(f"a flush of {sum(flush.values())} rows: {1e6 * statistics.median(ours):.0f} µs; Arrow takes {statistics.median(ratios):.1f} times as long")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
