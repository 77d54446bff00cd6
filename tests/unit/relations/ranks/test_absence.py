"""Views that are not made where a glance tells that they have no rows."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl
import pytest
from helpers.traces import runs

from proctor.invariants.relations.apart import _find_cut
from proctor.invariants.relations.consistent.replicas import _compare_ranks, _find_synchronised, replicas
from proctor.invariants.relations.contain.held import twins
from proctor.invariants.relations.fresh.buffers import _changes
from proctor.invariants.relations.views import cache
from proctor.invariants.relations.views.absence import alone, one_model, whole, without_buffers
from proctor.invariants.relations.views.collectives import _sent
from proctor.invariants.trace import Trace

SEEDS = range(16)  # runs of one to three ranks, with faults and without
VIEWS: list[tuple[Callable[[Trace], bool], Callable[[Trace], pl.DataFrame]]] = [
    (alone, lambda t: _compare_ranks(t, "all")), (alone, lambda t: _compare_ranks(t, "twins")), (alone, _find_synchronised), (alone, _sent),
    (one_model, twins), (without_buffers, _changes), (whole, _find_cut),
]  # fmt: skip


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[Trace]:
    return [Trace.load([path]) for path in runs(tmp_path_factory.mktemp("runs"), SEEDS)]


@pytest.mark.parametrize("number", range(len(VIEWS)))
def test_what_a_glance_says_is_true(number: int, traces: list[Trace]) -> None:
    idle, make = VIEWS[number]
    seen = [(idle(trace), make(trace)) for trace in traces]
    assert any(glance for glance, _ in seen)
    assert all(view.is_empty() for glance, view in seen if glance)


def test_ranks_are_compared_where_there_are_some(traces: list[Trace]) -> None:
    assert any(replicas(trace, "all").height for trace in traces if not alone(trace))


def test_an_idle_view_is_that_of_an_empty_table(traces: list[Trace], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_EMPTY", {})
    made: list[int] = []

    def make(trace: Trace) -> pl.DataFrame:
        made.append(1)
        return pl.DataFrame({"a": [1, 2]})

    first, second, third = traces[:3]
    assert cache.memo(first, "a test's view", make, idle=lambda t: True).height == 2  # nothing is known of it yet
    assert cache.memo(second, "a test's view", make, idle=lambda t: True).schema == {"a": pl.Int64}
    assert cache.memo(second, "a test's view", make, idle=lambda t: False).is_empty()  # kept with the trace
    assert cache.memo(third, "a test's view", make, idle=lambda t: False).height == 2
    assert len(made) == 2
