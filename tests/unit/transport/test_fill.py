"""What did not arrive is read from the trace files by its numbers, all of it or nothing but names and contexts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from helpers.live.transport import Rows, batch

from proctor.instrument.guard import Guard
from proctor.instrument.record.writer import Stream, TraceWriter
from proctor.invariants.schema import TABLES
from proctor.invariants.trace.tables import read_stream
from proctor.verify.transport.fill import fill
from proctor.verify.transport.inbox import Gap


def gap(**spans: tuple[int, int]) -> Gap:
    return Gap("0-1", "0-1", 0, 9, spans)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose one process wrote batches of 7 rows, in tables of 70."""
    folder = tmp_path / "procs" / "0-1"
    folder.mkdir(parents=True)
    for table, schema in TABLES.items():
        stream = Stream(folder / f"{table}.arrow", schema)
        for first in range(0, 70, 7):
            stream.append(batch(table, 7, first))
        stream.close()
    return tmp_path


@pytest.mark.parametrize("span", [(0, 70), (0, 1), (6, 8), (7, 14), (13, 43), (69, 70), (20, 20)])
def test_rows_are_found_by_their_numbers(run: Path, span: tuple[int, int]) -> None:
    found = fill(run, gap(calls=span, states=span, names=(0, 3)), wait_s=0)
    assert found.missing == 0 and not found.why
    if span[0] < span[1]:
        for table in ("calls", "states"):
            assert found.records[table].combine_chunks().to_batches()[0].equals(batch(table, span[1] - span[0], span[0]))
    assert found.records["names"].num_rows == 3


def test_what_is_not_written_yet_is_waited_for_and_then_missing(run: Path) -> None:
    slept: list[float] = []
    clock = iter(range(100))
    found = fill(run, gap(calls=(60, 80), context=(0, 5)), wait_s=5, now=lambda: float(next(clock)), sleep=slept.append)
    assert slept
    assert found.records.keys() == {"context"}
    assert found.missing == 20 and "calls" in found.why
    assert fill(run, gap(states=(60, 71), calls=(0, 5)), wait_s=0).records == {}


def test_files_that_are_elsewhere_damaged_or_foreign_fill_nothing(run: Path) -> None:
    elsewhere = Gap("0-2", "0-2", 0, 1, {"calls": (0, 5)})
    assert fill(run, elsewhere, wait_s=0).missing == 5
    assert fill(run, Gap("x", "../procs/0-1", 0, 1, {"calls": (0, 5)}), wait_s=0).missing == 5
    path = run / "procs" / "0-1" / "calls.arrow"
    data = bytearray(path.read_bytes())
    for at in range(700, len(data), 97):
        data[at] ^= 0x55
    path.write_bytes(data)
    assert fill(run, gap(calls=(30, 60)), wait_s=0).missing == 30
    path.write_bytes(data[:3])
    assert fill(run, gap(calls=(0, 5)), wait_s=0).missing == 5
    path.unlink()
    assert fill(run, gap(calls=(0, 5)), wait_s=0).missing == 5


def test_more_than_fits_into_memory_is_not_read(run: Path) -> None:
    found = fill(run, gap(calls=(0, 70), names=(0, 10)), wait_s=0, max_rows=60)
    assert found.records.keys() == {"names"} and found.missing == 70


class _Deaf:
    """A verifier's end that takes everything."""

    connected = True

    def __init__(self) -> None:
        self.offered: list[tuple[dict[str, pa.RecordBatch], int]] = []
        self.info: dict[str, Any] = {}
        self.ring = self

    def start(self) -> None: ...
    def room(self) -> bool:
        return True

    def offer(self, batches: dict[str, pa.RecordBatch], reached: int) -> bool:
        self.offered.append((batches, reached))
        return True

    def inform(self, info: dict[str, Any]) -> None:
        self.info = info

    def close(self) -> None: ...


def test_a_full_disk_does_not_stop_the_stream_and_the_files_say_where_rows_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made, degraded, deaf = Rows(), [], _Deaf()
    info: dict[str, Any] = {"rank": 0}

    def drain() -> dict[str, Any]:
        rows = made.next(names=1)
        return {t: {c: rows[t].column(c).to_pylist() for c in TABLES[t].names} for t in rows}

    writer = TraceWriter(
        tmp_path / "procs" / "0-1", drain, lambda: {**info, "dropped": writer.lost}, degraded.append, Guard(), deaf,  # type: ignore[arg-type]
    )  # fmt: skip
    whole = Stream.append

    def full(self: Stream, batch: pa.RecordBatch, at: int | None = None) -> None:
        raise OSError(28, "No space left on device")

    for step in range(9):
        monkeypatch.setattr(Stream, "append", full if 3 <= step < 6 else whole)
        writer.step_ended(0, step)
        writer._last_write = float("-inf")  # once a second
        writer.flush()
    writer.close()
    assert degraded == []
    assert [reached for _, reached in deaf.offered] == [*range(9), 8]
    assert deaf.info["dropped"] == 0 < writer.lost
    assert "the verifier gets all records" in capsys.readouterr().err
    names, cut = read_stream(tmp_path / "procs" / "0-1" / "names.arrow", "names")
    assert names.column("id").to_pylist() == list(range(10)) and not cut
    assert read_stream(tmp_path / "procs" / "0-1" / "calls.arrow", "calls")[0].num_rows == 7 * 20
    early = fill(tmp_path, gap(calls=(0, 60)), wait_s=0)
    assert early.missing == 0
    late = fill(tmp_path, gap(calls=(130, 170), context=(2, 9)), wait_s=0)
    assert late.missing == 0
    assert late.records["calls"].column("seq").to_pylist() == list(range(130, 170))
    assert fill(tmp_path, gap(calls=(50, 130)), wait_s=0).missing > 0
