"""What ends when an error of ours switches a part off is known, with the step."""

from __future__ import annotations

from typing import Any

import pytest

from proctor.instrument.config import RecordConfig
from proctor.instrument.guard import Guard
from proctor.instrument.probes import Probes, Sink, registry
from proctor.native import Recorder


def broken(*_: Any) -> None:
    raise ZeroDivisionError("an error of ours")


@pytest.fixture
def guard() -> Guard:
    made = Guard()
    made.step = lambda: 7
    return made


@pytest.mark.parametrize("name", sorted(registry()))
def test_of_each_probe_that_dies_its_values_end(name: str, guard: Guard, capsys: pytest.CaptureFixture[str]) -> None:
    probes = Probes(Sink(Recorder(), lambda: 0, RecordConfig(run=""), lambda: True), guard.run)
    guard.ends |= probes.ends()
    probe = next(p for p in probes._probes if p.name == name)
    probes._guarded_before(probe, broken)((), None)
    probes._guarded_after(probe, broken)((), None, None, False)
    assert guard.ended == [(f"values {kind.name.lower()}", 7) for kind in sorted(probe.kinds)]
    assert capsys.readouterr().err.count("is off after") == 1


@pytest.mark.parametrize(
    ("label", "ends"),
    [
        ("state", ["states"]),
        ("hook", ["all"]),
        ("writer", ["all"]),
        ("late torch.distributed.fsdp", ["calls"]),
        ("loader worker", ["values rng"]),
        ("a probe that nobody knows", ["all"]),
        ("capsules", []),
    ],
)
def test_what_ends(label: str, ends: list[str], guard: Guard) -> None:
    told: list[None] = []
    guard.on_end = lambda: told.append(None)
    guard.run(label, broken)
    guard.run(label, broken)
    assert [what for what, _ in guard.ended] == ends
    assert len(told) == 1
