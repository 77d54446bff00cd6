"""No row is lost between the thread that appends and the one that takes."""

from __future__ import annotations

import sys
import threading

from proctor.instrument.record.rows import take


class Holder:
    def __init__(self) -> None:
        self.rows: list[int] = []


def test_rows_appended_while_others_are_taken_all_arrive_once_and_in_order() -> None:
    holder, taken, stop = Holder(), list[int](), threading.Event()

    def writer() -> None:
        while not stop.is_set():
            taken.extend(take(holder.rows))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=writer)
    thread.start()
    try:
        for first in range(0, 60_000, 100):
            rows = holder.rows  # as a loop does that appends many
            for i in range(first, first + 100):
                rows.append(i)
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    taken.extend(take(holder.rows))
    assert taken == list(range(60_000))
