"""The collectives probe: what it says before and after a call, and of a call that does not return."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist

from proctor.instrument.config import RecordConfig
from proctor.instrument.observe import mesh
from proctor.instrument.probes import Home, Sink, collectives
from proctor.instrument.probes.collectives import Collectives
from proctor.invariants.codec import collective
from proctor.invariants.schema import Name, StateFlag, Value
from proctor.native import Recorder

KIND, PLACE, ITEM, FP, FLAGS = 2, 3, 4, 6, 9


@pytest.fixture(scope="module", autouse=True)
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("store") / "s"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Bench:
    """A probe with its sink, and calls through its hooks."""

    def __init__(self, tmp_path: Path, *, live: bool = True) -> None:
        self.recorder, self.is_live = Recorder(), live
        self.sink = Sink(self.recorder, lambda: 0, RecordConfig(run=str(tmp_path)), lambda: self.is_live)
        self.probe = Collectives(self.sink)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        before, after = self.probe.hooks(f"torch.distributed.{name}", Home.TORCH)
        assert before is not None
        assert after is not None
        before(args, kwargs)
        result = getattr(dist, name)(*args, **kwargs)
        after(args, kwargs, result, False)
        return result

    def rows(self, kind: Value) -> list[tuple[Any, ...]]:
        names = {code: text for which, code, text in self.recorder.drain_names() if which == int(Name.PLACE)}
        rows = [(names.get(r[PLACE], ""), *r) for r in self.sink.rows if r[KIND] == int(kind)]
        return rows

    def said(self) -> list[collective.Collective]:
        found = [collective.parse(text) for text, *_ in self.rows(Value.SENT)]
        return [f for f in found if f is not None]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_arguments_are_read_by_position_and_by_name(bench: Bench) -> None:
    x = torch.ones(4)
    bench.call("all_reduce", x, dist.ReduceOp.MAX)
    bench.call("broadcast", tensor=x, src=0)
    bench.call("barrier")
    reduce, broadcast, barrier = bench.said()
    assert (reduce.fn, reduce.op, reduce.group.ranks) == ("all_reduce", "MAX", "0")
    assert (broadcast.root, barrier.fn, barrier.root) == (0, "barrier", -1)
    assert reduce.caller.endswith("Bench.call")


def test_calls_of_a_group_are_counted_also_while_nothing_is_recorded(bench: Bench) -> None:
    x = torch.ones(3)
    bench.call("all_reduce", x)
    bench.is_live = False
    bench.call("all_reduce", x)
    bench.is_live = True
    bench.call("all_reduce", x)
    assert [r[1 + ITEM] for r in bench.rows(Value.SENT)] == [0, 2]


def test_results_are_hashed_when_they_are_there(bench: Bench) -> None:
    bench.call("all_reduce", torch.arange(6.0))
    bench.call("all_gather", [torch.zeros(2)], torch.ones(2))
    work = bench.call("all_reduce", torch.arange(5.0), async_op=True)
    work.wait()
    assert [collective.parse(r[0]).fn for r in bench.rows(Value.RECEIVED)] == ["all_reduce", "all_gather"]


def test_large_tensors_are_described_only(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "MAX_SENT_BYTES", 16)
    monkeypatch.setattr(collectives, "MAX_HASHED_BYTES", 16)
    bench.call("all_reduce", torch.arange(6.0))
    (row,) = bench.rows(Value.SENT)
    assert row[1 + FP] == 0
    assert row[1 + FLAGS] & int(StateFlag.UNHASHED)
    assert bench.rows(Value.RECEIVED) == []


def test_what_a_collective_calls_itself_is_not_another_call(bench: Bench) -> None:
    before, after = bench.probe.hooks("torch.distributed.all_gather_object", Home.TORCH)
    assert before is not None
    assert after is not None
    before(([None], 7), {})
    bench.call("all_gather", [torch.zeros(2)], torch.ones(2))
    after(([None], 7), {}, None, False)
    bench.call("all_reduce", torch.ones(2))
    assert [s.fn for s in bench.said()] == ["all_gather_object", "all_reduce"]


def test_a_rank_outside_the_group_says_nothing(bench: Bench) -> None:
    before, _ = bench.probe.hooks("torch.distributed.all_reduce", Home.TORCH)
    assert before is not None
    before((torch.ones(1),), {"group": dist.GroupMember.NON_GROUP_MEMBER})
    assert bench.sink.rows == []
    assert bench.probe.facts() == {}


def test_a_call_that_raised_is_not_open(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "OPEN_AFTER_S", 0.0)
    before, after = bench.probe.hooks("torch.distributed.barrier", Home.TORCH)
    assert before is not None
    assert after is not None
    before((), {})
    assert len(bench.probe.facts()["open"]) == 1
    after((), {}, None, True)
    assert bench.probe.facts() == {}


def test_an_open_call_is_told_with_the_users_line(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "OPEN_AFTER_S", 0.05)
    go = threading.Event()

    def stand() -> None:
        before, after = bench.probe.hooks("torch.distributed.barrier", Home.TORCH)
        assert before is not None
        assert after is not None
        before((), {})
        go.wait(5)
        after((), {}, None, False)

    thread = threading.Thread(target=stand)
    thread.start()
    time.sleep(0.2)
    facts = bench.probe.facts()
    go.set()
    thread.join()
    (one,) = facts["open"]
    assert facts["clock"] - one["since"] > 0.05e9
    assert Path(__file__).name in one["site"]
    assert bench.probe.facts() == {}


def test_backward_counts_only_where_ddp_is(bench: Bench) -> None:
    before, after = bench.probe.hooks("torch.Tensor.backward", Home.TORCH)
    assert before is not None
    assert after is not None
    before((), {})
    after((), {}, None, False)
    assert bench.said() == []
    _, wrapped = bench.probe.hooks("torch.nn.parallel.DistributedDataParallel.__init__", Home.TORCH)
    assert wrapped is not None
    wrapped((), {}, None, False)
    before((), {})
    bench.call("all_reduce", torch.ones(2))  # from a hook of the user's
    after((), {}, None, False)
    assert [s.fn for s in bench.said()] == ["backward", "all_reduce"]


def test_other_functions_are_left_alone(bench: Bench) -> None:
    assert bench.probe.hooks("torch.distributed.new_group", Home.TORCH) == (None, None)
    assert bench.probe.hooks("torch.distributed.all_reduce", Home.USER) == (None, None)


# -- axes ---------------------------------------------------------------------------------------------------------------


def test_groups_that_tile_the_world_are_axes() -> None:
    axes = mesh.Axes()
    for group in ([0, 1], [2, 3], [0, 2], [1, 3], [0, 1], [0], [0, 1, 2, 3], None):
        axes.add(group)
    assert [axes.coords(r, 4) for r in range(4)] == [{"inner": i, "outer": o} for o in (0, 1) for i in (0, 1)]


def test_interleaved_creation_and_three_axes() -> None:
    axes = mesh.Axes()
    for low in range(4):
        axes.add([low, low + 4])
        axes.add([2 * low, 2 * low + 1])
    for group in ([0, 2], [1, 3], [4, 6], [5, 7]):
        axes.add(group)
    assert axes.coords(6, 8) == {"inner": 0, "middle": 1, "outer": 1}


def test_groups_that_do_not_cover_the_world_are_no_axis() -> None:
    axes = mesh.Axes()
    axes.add([0, 1])
    axes.add([2, 4])
    assert axes.coords(0, 6) == {}


def pieces(bench: Bench, kind: Value) -> list[tuple[int, float]]:
    """Row of each piece: its fingerprint, and its projection."""
    return [(r[1 + FP], r[1 + 8]) for r in bench.rows(kind)]


def test_pieces_of_a_copy_have_the_fingerprint_of_what_was_sent(bench: Bench) -> None:
    x, y = torch.arange(6.0), torch.zeros(6)
    bench.call("all_gather_into_tensor", y, x)
    (sent,), ((got, _),) = bench.rows(Value.SENT), pieces(bench, Value.GOT)
    assert got == sent[1 + FP] != 0
    bench.call("scatter", torch.zeros(6), [x], 0)
    assert pieces(bench, Value.GIVEN)[-1][0] == pieces(bench, Value.GOT)[-1][0] == got


def test_a_sum_is_projected_before_and_after(bench: Bench) -> None:
    bench.call("all_reduce", torch.arange(1.0, 700.0))
    (_, given), (_, got) = *pieces(bench, Value.GIVEN), *pieces(bench, Value.GOT)
    assert given == got != 0, "of one rank the sum is what it gave"
    bench.call("all_reduce", torch.tensor([True, False]))
    bench.call("all_reduce", torch.ones(3), async_op=True).wait()
    assert (len(pieces(bench, Value.GIVEN)), len(pieces(bench, Value.GOT))) == (2, 1), "no result of a call that goes on is read"


def test_projections_draw_no_random_numbers(bench: Bench) -> None:
    before = torch.get_rng_state()
    bench.call("all_reduce", torch.ones(8))
    assert torch.equal(before, torch.get_rng_state())
