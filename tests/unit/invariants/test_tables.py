"""What is missing in a trace, or is not as it was written, is unknown: nothing there is healthy, and nothing is broken."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.processes import BACK, ZERO, process
from helpers.relations import ALL, rule
from helpers.runs import write_run

from proctor.errors import TraceError
from proctor.instrument.record.writer import Stream
from proctor.invariants.invariant import Severity
from proctor.invariants.pack import Pack
from proctor.invariants.schema import TABLES
from proctor.invariants.trace import Trace
from proctor.invariants.trace.tables import read_stream, read_table
from proctor.invariants.verdict import CheckResult
from proctor.invariants.wire.arrow_message import PREFIX
from proctor.verify.checker import check, exit_code
from proctor.verify.coverage import coverage

STEPS, BATCHES = 40, 10
RULES = [rule("test_happens", first=ZERO, then=BACK), rule("test_finite", variable="w")]
Damage = Callable[[bytes], bytes]


def states(bad: int | None = None) -> list[dict[str, object]]:
    return [{"var": {"name": "w"}, "step": s, "norm": 1.0, "flags": 4 if s == bad else 0} for s in range(STEPS)]


def recorded(path: Path, *, finished: bool = True, bad: int | None = None, lost_from: int | None = None) -> Path:
    """Two ranks as the writer leaves them: several batches, and how many rows there are."""
    more = {} if lost_from is None else {"lost_from": lost_from}
    ranks = [process(r, 2, steps=STEPS, states=states(bad), finished=finished, **(more if r else {})) for r in range(2)]
    write_run(path, ranks)
    for folder in (path / "procs").iterdir():
        written = {}
        for table, schema in TABLES.items():
            rows = read_stream(folder / f"{table}.arrow", table)[0]
            written[table] = rows.num_rows
            stream = Stream(folder / f"{table}.arrow", schema)
            size = max(rows.num_rows // BATCHES, 1)
            for begin in range(0, rows.num_rows, size):
                stream.append(rows.slice(begin, size).combine_chunks().to_batches()[0])
            stream.close()
        info = json.loads((folder / "process.json").read_text())
        (folder / "process.json").write_text(json.dumps({**info, "written": written}))
    return path


def verdict(run: Path) -> tuple[CheckResult, int]:
    trace = Trace.load([run])
    result = check(trace, [Pack(RULES)], relations=ALL)
    return result, exit_code(result, Severity.WARNING, complete=coverage(trace).complete)


def hurt(run: Path, table: str, damage: Damage) -> None:
    path = next((run / "procs").glob("1-*")) / f"{table}.arrow"
    path.write_bytes(damage(path.read_bytes()))


def third_message(blob: bytes) -> int:
    """Where the third message begins: the schema is the first."""
    from pyarrow import BufferReader, ipc

    source = BufferReader(blob)
    reader = ipc.open_stream(source)
    reader.read_next_batch()
    return source.tell()


def huge_length(blob: bytes) -> bytes:
    at = third_message(blob)
    return blob[: at + 4] + (0x7FFF_FFF0).to_bytes(4, "little") + blob[at + PREFIX.size :]


def ended(blob: bytes) -> bytes:
    return blob[: third_message(blob)] + bytes.fromhex("ffffffff00000000")


@pytest.mark.parametrize("table", ["calls", "states", "names", "context"])
@pytest.mark.parametrize(
    "damage",
    [
        *(lambda blob, share=share: blob[: int(len(blob) * share)] for share in (0.2, 0.35, 0.5, 0.97)),
        lambda blob: b"",
        huge_length,
        ended,
    ],
    ids=["20%", "35%", "50%", "97%", "emptied", "huge-length", "ended-early"],
)
def test_what_is_missing_is_unknown(tmp_path: Path, table: str, damage: Damage) -> None:
    run = recorded(tmp_path / "run")
    assert verdict(run)[1] == 0
    hurt(run, table, damage)
    try:
        result, code = verdict(run)
    except TraceError:
        return  # cut within its header: exit 2
    assert (result.violations, code) == ([], 3)
    assert any("rank 1 are damaged" in note for note in result.notes)


@pytest.mark.parametrize("table", ["calls", "states", "names", "context"])
def test_a_missing_file_is_unknown(tmp_path: Path, table: str) -> None:
    run = recorded(tmp_path / "run")
    (next((run / "procs").glob("1-*")) / f"{table}.arrow").unlink()
    result, code = verdict(run)
    assert (result.violations, code) == ([], 3)


def test_a_process_whose_facts_are_lost_is_unknown(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    (next((run / "procs").glob("1-*")) / "process.json").write_text("{")
    result, code = verdict(run)
    assert (result.violations, code) == ([], 3)


def test_flipped_bits_are_never_clean_and_never_broken(tmp_path: Path) -> None:
    run, drawn = recorded(tmp_path / "run"), random.Random(7)
    ends = []
    for _ in range(20):
        table = drawn.choice(["calls", "states", "names", "context"])
        path = next((run / "procs").glob("1-*")) / f"{table}.arrow"
        whole = path.read_bytes()
        bit = drawn.randrange(8 * len(whole))
        path.write_bytes(whole[: bit // 8] + bytes([whole[bit // 8] ^ 1 << bit % 8]) + whole[bit // 8 + 1 :])
        try:
            result, code = verdict(run)
        except TraceError:
            code = 2
        else:
            assert result.violations == []
            if code == 0:  # a bit that says nothing, such as padding: what was read is what was written
                assert read_table(path, table).rows.equals(_rows(path, whole, table))
        ends.append(code)
        path.write_bytes(whole)
    assert ends.count(3) > 10


def _rows(path: Path, blob: bytes, table: str) -> object:
    other = path.with_name("whole.arrow")
    other.write_bytes(blob)
    rows = read_table(other, table).rows
    other.unlink()
    return rows


def test_what_was_seen_before_the_damage_stands(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", bad=3)
    hurt(run, "states", lambda blob: blob[: int(len(blob) * 0.9)])
    result, code = verdict(run)
    assert [v.step for v in result.violations] == [3]
    assert code == 1


def test_what_was_not_seen_after_the_damage_is_no_violation(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", lost_from=30)
    assert verdict(run)[1] == 1
    hurt(run, "calls", lambda blob: blob[: int(len(blob) * 0.5)])
    result, code = verdict(run)
    assert (result.violations, code) == ([], 3)


def test_a_killed_process_is_judged_up_to_its_last_flush(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", finished=False, bad=3)
    for folder in (run / "procs").iterdir():  # killed within a write, after `process.json`
        info = json.loads((folder / "process.json").read_text())
        written = {table: count // 2 for table, count in info["written"].items()}
        (folder / "process.json").write_text(json.dumps({**info, "written": written}))
    hurt(run, "calls", lambda blob: blob[:-700])
    trace = Trace.load([run])
    assert [p.damaged for p in trace.processes] == [None, None]
    result, code = verdict(run)
    assert [v.step for v in result.violations] == [3]
    assert code == 1


def test_a_trace_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [process(steps=STEPS, states=states())])  # neither checksums nor counts
    result, code = verdict(run)
    assert (result.violations, code, result.notes) == ([], 0, [])


def test_names_of_columns_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run") / "procs"
    path = next(path.iterdir()) / "calls.arrow"
    path.write_bytes(path.read_bytes().replace(b"parent", b"\x94arent", 1))
    with pytest.raises(TraceError, match="whose names are no text"):
        read_table(path, "calls")
