"""oracle/localising/ops.py and oracle/collect/edges/ops.py: inside a module, the operation that is the first to differ."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from proctor.errors import OracleError  # noqa: E402
from proctor.oracle.collect.collector import Collector  # noqa: E402
from proctor.oracle.collect.config import CollectConfig  # noqa: E402
from proctor.oracle.localising.ops import Operation, Trace, first_wrong  # noqa: E402
from proctor.oracle.store import RankRecord  # noqa: E402
from proctor.oracle.store.op_log import FILE, read_log  # noqa: E402

WIDTH = 16


class Mix(nn.Module):
    """Code between two children; `twist` is where variants of it differ."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("gain", torch.linspace(0.5, 1.5, WIDTH))

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x / WIDTH**0.5, -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.enter(x)
        weights = self.scores(inner)
        return x + self.leave(weights * inner * self.gain)


class Model(nn.Module):
    def __init__(self, mix: type[Mix] = Mix) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.mix, self.last = nn.Linear(WIDTH, WIDTH), mix(), nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.mix(self.first(x)))  # type: ignore[no-any-return]


def inputs(seed: int = 1) -> torch.Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(seed))


def recorded(out: Path, model: nn.Module, x: torch.Tensor | None = None, module: str = "mix", calls: int = 1) -> Trace:
    collector = Collector(CollectConfig(folder=str(out), ops={0: module}))
    collector.install()
    try:
        collector.adopt([model])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(calls):
            model(inputs() if x is None else x).square().mean().backward()
        optimizer.step()
    finally:
        collector.end()
    record = RankRecord(out / "rank0")
    assert record.info.done, record.info.notes
    found = Trace(record)
    assert not found.log.error
    return found


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return recorded(tmp_path_factory.mktemp("ops") / "reference", Model())


def wrong(reference: Trace, out: Path, mix: type[Mix], phase: str = "forward") -> Operation | None:
    return first_wrong(reference, {0: recorded(out, Model(mix))}, phase)


def line_of(function: Callable[..., object], text: str) -> str:
    import inspect

    lines, start = inspect.getsourcelines(function)
    return f"{__file__}:{start + next(i for i, line in enumerate(lines) if text in line)}"


def test_only_the_modules_own_operations(reference: Trace) -> None:
    labels = [op.label for op in reference.log.ops if op.what == "op" and op.phase == "forward"]
    assert "aten._softmax" in labels and "aten.addmm" not in labels
    softmax = next(op for op in reference.log.ops if op.label == "aten._softmax")
    assert softmax.source == line_of(Mix.scores, "softmax")
    assert any(op.phase == "backward" and op.label == "aten._softmax_backward_data" and op.source == softmax.source for op in reference.log.ops)
    edges = {(op.what, op.phase, op.kind, op.name) for op in reference.log.ops if op.what != "op"}
    assert {("source", "forward", "input", "mix"), ("sink", "forward", "input", "mix.leave"), ("sink", "backward", "grad_input", "mix"),
            ("source", "backward", "grad_output", "mix")} <= edges  # fmt: skip


def test_the_same_program_has_no_wrong_operation(reference: Trace, tmp_path: Path) -> None:
    candidate = {0: recorded(tmp_path / "c", Model())}
    assert first_wrong(reference, candidate, "forward") is None
    assert first_wrong(reference, candidate, "backward") is None


def test_an_operation_with_another_scale(reference: Trace, tmp_path: Path) -> None:
    class Scaled(Mix):
        def scores(self, x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(x / (WIDTH + 1) ** 0.5, -1)

    found = wrong(reference, tmp_path / "c", Scaled)
    assert found is not None and found.label == "aten.div" and found.source == line_of(Scaled.scores, "softmax")
    assert found.error == pytest.approx(1 - (16 / 17) ** 0.5, rel=0.1)
    assert "div (" in str(found)


def test_an_operation_that_is_too_much(reference: Trace, tmp_path: Path) -> None:
    class Doubled(Mix):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = self.enter(x)
            shifted = inner + torch.zeros(WIDTH)  # harmless
            shifted = shifted.roll(1, -1)
            return x + self.leave(self.scores(shifted) * inner * self.gain)

    found = wrong(reference, tmp_path / "c", Doubled)
    assert found is not None and found.label == "aten.roll" and found.source == line_of(Doubled.forward, "roll")
    assert "no such operation" in found.note


def test_in_place_and_other_orders_are_followed(reference: Trace, tmp_path: Path) -> None:
    class InPlace(Mix):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = self.enter(x)
            extra = torch.ones(3).cumsum(0)  # noqa: F841 - what leads nowhere is not looked at
            weights = self.scores(inner).clone()
            weights.mul_(inner)
            weights.mul_(self.gain)
            return self.leave(weights).add_(x)

    assert wrong(reference, tmp_path / "c", InPlace) is None

    class Late(InPlace):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = self.enter(x)
            weights = self.scores(inner).clone()
            weights.mul_(inner)
            weights.mul_(self.gain).clamp_(max=0.05)
            return self.leave(weights).add_(x)

    found = wrong(reference, tmp_path / "d", Late)
    assert found is not None and found.label == "aten.clamp_" and found.source == line_of(Late.forward, "clamp_")


def test_a_backward_of_its_own(reference: Trace, tmp_path: Path) -> None:
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(x, -1)

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            return grad * 0.5

    class Own(Mix):
        def scores(self, x: torch.Tensor) -> torch.Tensor:
            return Half.apply(x / WIDTH**0.5)  # type: ignore[no-any-return,no-untyped-call]

    assert first_wrong(reference, {0: recorded(tmp_path / "c", Model(Own))}, "forward") is None
    found = wrong(reference, tmp_path / "d", Own, "backward")
    assert found is not None and found.phase == "backward" and found.source == line_of(Half.backward, "grad * 0.5")


def test_shards_and_partial_sums(reference: Trace, tmp_path: Path) -> None:
    """Two ranks, each with half of the channels of `leave`'s input: the sum is made by hand."""

    def rank(number: int, add_up: bool) -> Trace:
        class Part(Mix):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                inner = self.enter(x)
                mine = slice(number * WIDTH // 2, (number + 1) * WIDTH // 2)
                part = (self.scores(inner) * inner * self.gain)[:, mine]
                out = F.linear(part, self.leave.weight[:, mine])
                if add_up:
                    other = slice(WIDTH - mine.stop, WIDTH - mine.start)
                    out = out + F.linear((self.scores(inner) * inner * self.gain)[:, other], self.leave.weight[:, other])
                return x + out + self.leave.bias

        return recorded(tmp_path / f"{number}-{add_up}", Model(Part))

    class Plain(Mix):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = self.enter(x)
            return x + F.linear(self.scores(inner) * inner * self.gain, self.leave.weight) + self.leave.bias

    whole = recorded(tmp_path / "r", Model(Plain))
    assert first_wrong(whole, {0: rank(0, True), 1: rank(1, True)}, "forward") is None
    found = first_wrong(whole, {0: rank(0, False), 1: rank(1, False)}, "forward")
    assert found is not None and found.label == "aten.add" and "summand" in found.note and found.ranks == (0, 1)


def test_calls_of_a_rank_are_those_of_the_reference(tmp_path: Path) -> None:
    model = Model()
    theirs = recorded(tmp_path / "r", copy.deepcopy(model), calls=3)
    assert {op.call for op in theirs.log.ops} == {0, 1, 2}
    mine = recorded(tmp_path / "c", copy.deepcopy(model))
    assert first_wrong(theirs, {0: mine}, "forward", call=lambda rank, call: call + 2) is None


def test_recording_changes_nothing(tmp_path: Path) -> None:
    grads = []
    for number in range(2):
        model = Model()
        if number:
            recorded(tmp_path / "c", model)
        else:
            model(inputs()).square().mean().backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True) if a is not None and b is not None)


def test_too_many_operations_are_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proctor.oracle.collect.edges.ops.MAX_OPS", 4)
    found = recorded(tmp_path / "c", Model())
    assert found.log.truncated and len(found.log.ops) <= 8


def test_damaged_files(tmp_path: Path) -> None:
    assert read_log(tmp_path / FILE).ops == []
    for text in ("{", '{"ops":[{"number":1}],"truncated":false,"error":""}', "[" * 100):
        (tmp_path / FILE).write_text(text)
        with pytest.raises(OracleError):
            read_log(tmp_path / FILE)
