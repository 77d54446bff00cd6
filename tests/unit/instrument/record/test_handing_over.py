"""What the training thread does itself when a step ends: it hands over little, and waits for nothing."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.live.transport import Rows, until

from proctor.instrument.guard import Guard
from proctor.instrument.record import writer as module
from proctor.instrument.record.writer import SETTLING_STEPS, STREAM_HERE_ROWS, TraceWriter
from proctor.invariants.schema import TABLES

STEP = SETTLING_STEPS + 1


class Peer:
    """Takes what it is offered, and keeps by whom."""

    connected = True

    def __init__(self) -> None:
        self.by: list[tuple[int, int]] = []
        self.takes = True

    def start(self) -> None: ...

    def offer(self, batches: dict[str, Any], reached: int) -> bool:
        self.by.append((reached, threading.get_ident()))
        return self.takes

    def inform(self, info: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class Process:
    """A writer, and the thread that trains."""

    def __init__(self, folder: Path) -> None:
        self.made, self.peer, self.guard = Rows(), Peer(), Guard()
        self.raises: BaseException | None = None
        self.writer = TraceWriter(folder / "procs" / "0-1", self._drain, lambda: {"rank": 0}, lambda failing: None, self.guard, self.peer)  # type: ignore[arg-type]
        self.writer._pause = 0.0

    def _drain(self) -> dict[str, Any]:
        if self.raises is not None:
            raise self.raises
        rows = self.made.next(names=1)
        return {t: {c: rows[t].column(c).to_pylist() for c in TABLES[t].names} for t in rows}


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    one = Process(tmp_path)
    yield one
    one.raises = None
    one.writer.close()


def here() -> int:
    return threading.get_ident()


def test_a_small_flush_is_handed_over_by_the_thread_that_ends_the_step_and_reaches_the_files(process: Process) -> None:
    process.writer.step_ended(20, STEP)
    assert process.peer.by == [(STEP, here())] and process.writer.rows == 0
    process.writer.flush()
    process.writer.close()
    assert process.writer.rows == 3 * sum(batch.num_rows for batch in Rows().next(names=1).values())


@pytest.mark.parametrize(("rows", "step"), [(STREAM_HERE_ROWS + 1, STEP), (20, SETTLING_STEPS - 1)])
def test_what_is_large_or_tells_of_the_process_is_the_writers_work(process: Process, rows: int, step: int) -> None:
    process.writer.start()
    process.writer.step_ended(rows, step)
    assert until(lambda: bool(process.peer.by)) and {thread for _, thread in process.peer.by} == {process.writer._thread.ident}


def test_a_disk_that_hangs_holds_up_no_step(process: Process) -> None:
    with process.writer._lock:  # as the writer's thread has while it writes
        began = time.monotonic()
        process.writer.step_ended(20, STEP)
        assert time.monotonic() - began < 1 and not process.peer.by
    assert process.writer._wake.is_set()


def test_what_the_verifier_missed_is_written_before_it_hears_of_the_next(process: Process) -> None:
    process.peer.takes = False
    process.writer.step_ended(20, STEP)
    process.peer.takes, process.writer._pause = True, 0.0
    process.writer.step_ended(20, STEP + 1)
    assert len(process.peer.by) == 1 and process.writer._wake.is_set()


def test_the_last_step_for_a_while_is_told_by_the_writers_thread(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FLUSH_S", 1000.0)
    process.writer._last_write = time.monotonic()
    process.writer.start()
    process.writer._pause, process.writer._told_at = 600.0, time.monotonic()
    process.writer.step_ended(20, STEP)  # too soon after the last one
    assert not process.peer.by
    process.writer._pause = 0.05
    assert until(lambda: process.peer.by == [(STEP, process.writer._thread.ident)])


def test_an_error_of_ours_ends_the_recording_and_not_the_step(process: Process, capsys: pytest.CaptureFixture[str]) -> None:
    process.raises = ValueError("ours")
    process.writer.step_ended(20, STEP)
    process.writer.step_ended(20, STEP + 1)
    assert process.guard.disabled("writer") and capsys.readouterr().err.count("ours") == 1


def test_an_exception_of_a_signal_handler_passes_and_what_it_cost_is_counted(process: Process) -> None:
    process.raises = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        process.writer.step_ended(20, STEP)
    assert process.writer.torn == 20 and not process.writer._lock.locked()


def test_an_interrupt_at_any_moment_leaves_no_lock_taken(process: Process) -> None:
    """One between taking the lock and knowing of it left the lock taken for ever: the process hung at its exit."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    process.writer._guard.run = lambda probe, function, *args: None  # type: ignore[method-assign]
    before = signal.signal(signal.SIGALRM, interrupt)
    interrupted = 0
    try:
        for i in range(3000):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + i % 97 * 1e-6)
                for _ in range(200):
                    process.writer.step_ended(20, STEP)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
            assert not process.writer._lock.locked()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 2000


def test_files_are_written_four_times_a_second_in_the_first_seconds_and_later_where_thousands_of_rows_wait(process: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    process.writer.close()
    writer = TraceWriter(tmp_path / "files", process._drain, lambda: {"rank": 0}, lambda failing: None, Guard())
    few, many = module.STEP_FLUSH_ROWS

    def asks(waiting: int) -> bool:
        now[0] += module.STEP_FLUSH_S
        writer._wake.clear()
        writer.step_ended(waiting, STEP)
        return writer._wake.is_set()

    for _ in range(module.FIRST_FLUSHES):
        assert not asks(few - 1) and asks(few)
        writer.flush()
    writer.flush()
    assert not asks(few) and not asks(many - 1) and asks(many)
    writer.close()
