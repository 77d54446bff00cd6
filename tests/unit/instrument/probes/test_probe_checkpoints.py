"""The checkpoints probe: what is saved, loaded and restored, tensor by tensor."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest

from proctor.instrument.config import RecordConfig
from proctor.instrument.probes import NO_HOOKS, Home, Sink
from proctor.invariants.schema import Name, Value
from proctor.native import Recorder

torch = pytest.importorskip("torch")

from proctor.instrument.probes.checkpoints import (  # noqa: E402  torch first
    GIVEN,
    HELD,
    LEFT,
    MODULE_LOAD,
    OPTIMIZER_LOAD,
    OWN,
    UNKNOWN,
    Checkpoints,
)

nn = torch.nn


class Watch:
    def __init__(self) -> None:
        self.recorder = Recorder()
        self.sink = Sink(self.recorder, lambda: 0, RecordConfig(run="run"), lambda: True)
        self.probe = Checkpoints(self.sink)
        self.texts: dict[int, str] = {}
        self.metas: dict[int, Any] = {}

    def around(self, name: str, function: Any, *args: Any, **kwargs: Any) -> list[tuple[str, int, int]]:
        """Place, item and fingerprint of the rows."""
        before, after = self.probe.hooks(name, Home.TORCH)
        if before is not None:
            before(args, kwargs or None)
        result = function(*args, **kwargs)
        if after is not None:
            after(args, kwargs or None, result, False)
        self.texts |= {code: text for k, code, text in self.recorder.drain_names() if k == int(Name.PLACE)}
        rows = [(self.texts[r[3]], r[4], r[6]) for r in self.sink.take_rows()]
        return sorted(rows)


def model() -> Any:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def test_a_file_is_found_again(tmp_path: Path) -> None:
    watch, net = Watch(), model()
    saved = watch.around(
        "torch.save", torch.save, {"net": net.state_dict(), "list": [torch.ones(2)]}, tmp_path / "a.pt"
    )
    loaded = watch.around("torch.load", torch.load, str(tmp_path / "a.pt"))
    assert saved == loaded
    assert {"<file>", "['net']['0.weight']", "['list'][0]"} <= {p for p, _, _ in saved}


def test_a_whole_module_is_its_state(tmp_path: Path) -> None:
    watch, net = Watch(), model()
    places = {p for p, _, _ in watch.around("torch.save", torch.save, net, io.BytesIO())}
    assert places == {f"['{key}']" for key in net.state_dict()}


def items(rows: list[tuple[str, int, int]], item: int) -> set[str]:
    return {place for place, i, _ in rows if i == item}


def test_what_a_module_is_given_and_holds() -> None:
    watch, net = Watch(), model()
    rows = watch.around(MODULE_LOAD, type(net).load_state_dict, net, copy.deepcopy(model().state_dict()))
    assert items(rows, GIVEN) == items(rows, HELD) == set(net.state_dict())
    assert {(p, fp) for p, i, fp in rows if i == GIVEN} == {(p, fp) for p, i, fp in rows if i == HELD}
    assert not items(rows, OWN) | items(rows, UNKNOWN) | items(rows, LEFT)


def test_a_state_that_is_the_modules_own_memory() -> None:
    watch, net = Watch(), model()
    rows = watch.around(MODULE_LOAD, type(net).load_state_dict, net, net.state_dict())
    assert items(rows, OWN) == set(net.state_dict())


def test_memory_that_was_loaded_into_is_no_longer_the_modules_own() -> None:
    watch, net = Watch(), model()
    state = {"model": net.state_dict()}  # how torch.distributed.checkpoint is meant to be used
    watch.around("torch.distributed.checkpoint.load", lambda given: None, state)
    assert not items(watch.around(MODULE_LOAD, type(net).load_state_dict, net, state["model"]), OWN)


def test_names_that_do_not_match() -> None:
    watch, net = Watch(), model()
    given = {f"module.{k}": v for k, v in model().state_dict().items()}
    rows = watch.around(MODULE_LOAD, type(net).load_state_dict, net, given, strict=False)
    assert items(rows, UNKNOWN) == set(given)
    assert items(rows, LEFT) == set(net.state_dict())
    assert not items(rows, GIVEN)


def test_buffers_that_do_not_persist_are_not_missed() -> None:
    watch, net = Watch(), nn.Linear(2, 2)
    net.register_buffer("cache", torch.ones(2), persistent=False)
    rows = watch.around(MODULE_LOAD, nn.Module.load_state_dict, net, nn.Linear(2, 2).state_dict())
    assert not items(rows, LEFT)


def test_moments_of_an_optimizer() -> None:
    def trained() -> Any:
        net = nn.Linear(2, 2)
        optimizer = torch.optim.Adam(net.parameters())
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return optimizer

    watch, optimizer = Watch(), trained()
    rows = watch.around(
        OPTIMIZER_LOAD, type(optimizer).load_state_dict, optimizer, copy.deepcopy(trained().state_dict())
    )
    assert "state[1]['exp_avg_sq']" in items(rows, GIVEN) == items(rows, HELD)


def test_other_functions_are_left_alone() -> None:
    assert Watch().probe.hooks("torch.cat", Home.TORCH) == NO_HOOKS


def kept(watch: Watch, name: str, function: Any, *args: Any, **kwargs: Any) -> dict[str, str]:
    """What a call says of moments and of their precision: by `what`, "" where all is well."""
    before, after = watch.probe.hooks(name, Home.TORCH)
    if before is not None:
        before(args, kwargs or None)
    result = function(*args, **kwargs)
    if after is not None:
        after(args, kwargs or None, result, False)
    watch.metas |= {code: json.loads(text) for k, code, text in watch.recorder.drain_names() if k == int(Name.META)}
    return {watch.metas[r[5]]["what"]: watch.metas[r[5]]["seen"] for r in watch.sink.take_rows() if r[2] == int(Value.KEPT)}


def trained(dtype: Any = torch.float32) -> Any:
    net = nn.Linear(2, 3).to(dtype)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 2, dtype=dtype)).sum().backward()
    optimizer.step()
    return optimizer


def test_a_template_without_moments_leaves_them_in_the_file(tmp_path: Path) -> None:
    checkpoint = pytest.importorskip("torch.distributed.checkpoint")
    watch, folder = Watch(), str(tmp_path / "saved")
    kept(watch, "torch.distributed.checkpoint.save", checkpoint.save, {"optimizer": trained().state_dict()}, checkpoint_id=folder)
    for other, empty in ((torch.optim.AdamW(nn.Linear(2, 3).parameters()), True), (trained(), False)):
        state = {"optimizer": other.state_dict()}
        kept(watch, "torch.distributed.checkpoint.load", checkpoint.load, state, checkpoint_id=folder)
        told = kept(watch, OPTIMIZER_LOAD, torch.optim.Optimizer.load_state_dict, other, state["optimizer"])
        assert bool(told["moments"]) is empty
    # One that begins anew on purpose has no file behind it.
    fresh = torch.optim.AdamW(nn.Linear(2, 3).parameters())
    assert kept(watch, OPTIMIZER_LOAD, torch.optim.Optimizer.load_state_dict, fresh, torch.optim.AdamW(nn.Linear(2, 3).parameters()).state_dict()) == {}


def test_moments_that_lose_digits_are_told(tmp_path: Path) -> None:
    watch = Watch()
    told = kept(watch, OPTIMIZER_LOAD, torch.optim.Optimizer.load_state_dict, trained(torch.bfloat16), trained().state_dict())
    assert "exp_avg" in told["precision"] and "bfloat16" in told["precision"]
    assert kept(watch, OPTIMIZER_LOAD, torch.optim.Optimizer.load_state_dict, trained(), trained(torch.bfloat16).state_dict())["precision"] == ""
