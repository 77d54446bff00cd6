"""oracle/merging/align.py: names over stages, calls over replicas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from proctor.oracle.merging.align import Calls, Naming, deal_calls, kept_names, name_tensors, within
from proctor.oracle.plans.plan import Plan
from proctor.oracle.tensors import Entry

RNG = np.random.default_rng(0)


def entry(kind: str, name: str, values: Any, call: int = 0) -> Entry:
    return Entry(0, call, kind, name, "", "", "", str(values.dtype), values.shape, "", name, 0)


class Rank:
    """Stands in for a `RankRecord` of parameters."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.entries = [entry("param", name, v) for name, v in values.items()]

    def array(self, held: Entry) -> Any:
        return self.values[held.name]


LAYERS = {f"layers.{i}.fc.{leaf}": RNG.standard_normal(shape).astype(np.float32) for i in range(4) for leaf, shape in (("weight", (4, 6)), ("bias", (4,)))}
MODEL = {**LAYERS, "embedding.weight": RNG.standard_normal((10, 6)).astype(np.float32)}


def names(rank: dict[str, Any], *others: dict[str, Any], plan: Plan | None = None, coords: dict[str, int] | None = None) -> Naming:
    reference = {n: (entry("param", n, v), lambda e: MODEL[e.name]) for n, v in MODEL.items()}
    records: list[Any] = [Rank(rank), *map(Rank, others)]
    taken = set().union(*(kept_names(reference, r, plan, coords or {}) for r in records))
    return name_tensors(reference, records[0], plan, coords or {}, taken)


def test_a_stage_that_counts_its_layers_from_zero() -> None:
    first = {n: v for n, v in MODEL.items() if not n.startswith(("layers.2", "layers.3"))}
    second = {n.replace("layers.2", "layers.0").replace("layers.3", "layers.1"): v for n, v in LAYERS.items() if n[7] in "23"}
    naming = names(second, first)
    assert naming(entry("param", "layers.1.fc.weight", np.zeros(1))) == "layers.3.fc.weight"
    assert naming(entry("output", "layers.0.fc", np.zeros(1))) == "layers.2.fc"
    assert names(first, second)(entry("output", "layers.0.fc", np.zeros(1))) == "layers.0.fc"


def test_the_second_copy_of_a_tied_weight() -> None:
    naming = names({"head.weight": MODEL["embedding.weight"]}, MODEL)
    assert naming(entry("main_grad", "head.weight", np.zeros(1))) == "embedding.weight"
    assert naming(entry("output", "head", np.zeros(1))) == "head"


def test_shards_keep_their_names() -> None:
    naming = names({n: v[:2] for n, v in MODEL.items()})
    assert not naming.renames and not naming.prefixes


def test_a_wrong_parameter_is_not_renamed() -> None:
    wrong = {**MODEL, "layers.0.fc.weight": RNG.standard_normal((4, 6)).astype(np.float32)}
    assert names(wrong)(entry("param", "layers.0.fc.weight", np.zeros(1))) == "layers.0.fc.weight"


def test_constants_say_nothing() -> None:
    assert not names({"norm.weight": np.ones(4, np.float32), "norm.bias": np.zeros(4, np.float32)}).renames


def test_renames_of_a_plan_come_first() -> None:
    plan = Plan("pp=2").rename(r"layers\.(\d+)\.(.*)", r"layers.{g1 + 2*pp}.\2", where={"pp": 1})
    naming = names({}, plan=plan, coords={"pp": 1})
    assert naming(entry("output", "layers.1.fc", np.zeros(1))) == "layers.3.fc"
    assert naming.planned("layers.0.fc.weight") == "layers.2.fc.weight"


@pytest.mark.parametrize(("in_turn", "expected"), [(False, [4, 5, 6, 7]), (True, [1, 3, 5, 7])])
def test_microbatches_are_dealt_out_as_the_values_say(in_turn: bool, expected: list[int]) -> None:
    full = {call: RNG.standard_normal((4, 4)) for call in range(8)}
    mine = [full[c] for c in expected]
    samples = [(entry("input", "", v, call=i), v, full, 4, 1) for i, v in enumerate(mine[:2])]
    calls = deal_calls({"": 8}, {"": 4}, samples, None)
    assert calls == Calls(2, 1, in_turn)
    assert [calls.of(c, 4, 8) for c in range(4)] == expected


def test_calls_that_agree_stay() -> None:
    assert deal_calls({"": 4}, {"": 4}, [], 1) == Calls()
    assert Calls(2, 1).of(3, 4, 4) == 3
    assert Calls().of(5, 8, 4) == 2  # a module that the candidate calls twice as often


def test_a_module_that_runs_twice_in_a_forward_is_dealt_out_by_forwards() -> None:
    """An encoder's call stays one when a batch is halved, and a decoder's."""
    twice = within("rnn", {"": 2, "rnn": 4}, {"": 1, "rnn": 2})
    assert twice == 2 and [Calls().of(c, 4, 2, twice) for c in range(4)] == [0, 1, 0, 1]
    assert [Calls(2, 1).of(c, 4, 8, within("rnn", {"": 2, "rnn": 4}, {"": 4, "rnn": 8})) for c in range(4)] == [4, 5, 6, 7]
    assert [Calls(2, 1, in_turn=True).of(c, 4, 8, 2) for c in range(4)] == [2, 3, 6, 7]
    assert within("model.rnn", {"model": 2, "model.rnn": 4}, {"model": 1, "model.rnn": 2}) == 2
    # A forward that goes through its own microbatches, a module that is left out now and then, and one that nobody calls.
    assert within("rnn", {"": 1, "rnn": 4}, {"": 1, "rnn": 2}) == within("rnn", {"": 2, "rnn": 3}, {"": 1, "rnn": 2}) == within("other", {"": 2}, {"": 1}) == 1
