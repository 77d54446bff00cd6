"""A ring that is full drops the newest and counts; what the verifier lacks is said again, as far as it is kept."""

from __future__ import annotations

from helpers.live.transport import Rows, encoded
from hypothesis import given, settings
from hypothesis import strategies as st

from proctor.instrument.record.ring import KEPT_BYTES, Entry, Ring
from proctor.invariants.wire import frames
from proctor.invariants.wire.frames import Flush


def entry(n: int, rows: Rows | None = None, **counts: int) -> Entry:
    sizes_rows, sizes, body = frames.pack(encoded((rows or Rows()).next(**counts)))
    return Entry(Flush(n, n, (0,) * 5, sizes_rows, sizes), body)


def drain(ring: Ring) -> list[Entry]:
    found: list[Entry] = []
    while taken := ring.take():
        found += taken
    return found


def numbers(entries: list[Entry]) -> list[int]:
    return [e.flush.n for e in entries if not e.flush.again]


def test_a_full_ring_drops_the_newest_and_counts_it() -> None:
    one = entry(0)
    ring = Ring(max_bytes=10 * one.size)
    taken = [ring.put(entry(n)) for n in range(30)]
    assert taken[:9] == [True] * 9
    assert sum(taken) + ring.dropped_flushes == 30
    assert ring.dropped_rows == ring.dropped_flushes * one.rows
    assert ring.size <= 10 * one.size
    assert numbers(drain(ring)) == list(range(sum(taken)))
    assert ring.put(entry(30))


def test_after_a_drop_names_and_contexts_of_what_was_dropped_come_first() -> None:
    ring, rows = Ring(max_flushes=2), Rows()
    for n in range(5):
        ring.put(entry(n, rows, names=1))
    assert numbers(drain(ring)) == [0, 1]
    ring.put(entry(5, rows, names=1))
    again = drain(ring)
    assert sorted((e.flush.n, e.flush.again) for e in again[:-1]) == [(n, True) for n in (2, 2, 3, 3, 4, 4)]
    assert again[-1].flush.n == 5
    assert {frames.ORDER[i] for e in again[:-1] for i, c in enumerate(e.flush.rows) if c} == {"names", "context"}


def test_a_new_verifier_gets_all_names_and_what_is_kept() -> None:
    ring, rows = Ring(max_flushes=4), Rows()
    for n in range(200):
        ring.put(entry(n, rows, names=1))
        drain(ring)
    ring.rewind(-1)
    said = drain(ring)
    assert numbers(said) == [196, 197, 198, 199]
    names = [e.flush.n for e in said if e.flush.again and e.flush.rows[frames.ORDER.index("names")]]
    contexts = [e.flush.n for e in said if e.flush.again and e.flush.rows[frames.ORDER.index("context")]]
    assert names == list(range(196))
    assert contexts == [*range(32), *range(136, 196)]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.just("put"), st.just("take"), st.integers(0, 100)), max_size=60), st.integers(3, 12))
def test_nothing_is_said_twice_or_out_of_order_between_two_cuts(acts: list[str | int], size: int) -> None:
    ring, n, have, sent, taken = Ring(max_bytes=size * entry(0).size), 0, -1, -1, set()
    for act in acts:
        if act == "put":
            if ring.put(entry(n)):
                taken.add(n)
            n += 1
        elif act == "take":
            for number in numbers(ring.take()):
                assert number > sent
                sent = number
        elif isinstance(act, int):  # a cut: some of what was sent has arrived
            have = max(have, min(sent, have + act))
            ring.rewind(have)
            sent = have
        assert ring.size <= size * entry(0).size
    waiting = ring.waiting
    rest = numbers(drain(ring))
    assert rest == sorted(rest)
    assert len(rest) == waiting == len(set(rest))
    assert all(number > sent and number in taken for number in rest)


def test_what_was_sent_is_kept_within_a_budget() -> None:
    ring = Ring()
    big = entry(0, calls=20_000)
    for n in range(40):
        assert ring.put(Entry(Flush(n, n, big.flush.at, big.flush.rows, big.flush.sizes), big.body))
        drain(ring)
    assert ring.size <= KEPT_BYTES
