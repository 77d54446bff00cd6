"""The attributes probe: which plain attributes of the modules given to a function did it change?"""

from __future__ import annotations

import json
from typing import Any

import pytest

from proctor.instrument.config import RecordConfig
from proctor.instrument.probes import Home, Sink
from proctor.instrument.probes.attributes import ModuleAttributes
from proctor.invariants.schema import Name
from proctor.native import Recorder

torch = pytest.importorskip("torch")


def watched(function: Any, name: str, *args: Any, home: Home = Home.USER) -> list[tuple[str, Any]]:
    """Call a function under the probe; place, and the number or the change of each row."""
    recorder = Recorder()
    sink = Sink(recorder, lambda: 0, RecordConfig(run="run"), lambda: True)
    before, after = ModuleAttributes(sink).hooks(name, home)
    if before is None or after is None:
        return []
    before(args, None)
    function(*args)
    after(args, None, None, False)
    texts = {(kind, code): text for kind, code, text in recorder.drain_names()}
    rows = []
    for row in sink.take_rows():
        place = texts.get((int(Name.PLACE), row[3]), "")
        rows.append((place, json.loads(texts[(int(Name.META), row[5])]) if row[5] else row[8]))
    return rows


def model() -> Any:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1))
    for i, layer in enumerate(net):
        layer.id = i
    return net


def test_an_overwritten_attribute_is_told_with_both_values() -> None:
    def initialize(net: Any) -> None:
        for layer in net:
            layer.id = 0
        net.stage = 4  # new: nobody's loss

    rows = watched(initialize, "minilib.initialize", model())
    assert rows[0][0] == "" and rows[0][1] >= 7
    assert rows[1:] == [("1.id", {"old": "1", "new": "0"}), ("2.id", {"old": "2", "new": "0"})]


def test_a_removed_attribute_counts_and_flags_do_not() -> None:
    def initialize(nets: list[Any]) -> None:
        del nets[0][1].id
        nets[0].eval()

    assert [place for place, _ in watched(initialize, "minilib.initialize", [model()])] == ["", "1.id"]


def test_a_method_of_the_module_itself_and_torch_are_left_alone() -> None:
    class Counter(torch.nn.Module):
        calls = 0

        def count(self) -> None:
            self.calls += 1

    assert watched(Counter.count, "__main__.Counter.count", Counter()) == []
    assert watched(lambda net: None, "torch.nn.utils.fuse", model(), home=Home.TORCH) == []
