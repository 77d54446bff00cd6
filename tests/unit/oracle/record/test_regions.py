"""oracle/collect/edges/regions.py, uncompiled.py: compiled candidates, compared at the edges of what is compiled.

The backends keep the graph as it is ("eager") or spoil it, so that no C++ compiler is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from helpers.small_net import Net, batch, program, reference, step
from torch import nn

import proctor.oracle
from proctor.oracle.judging.check import Comparison
from proctor.oracle.recording.record import Recorder
from proctor.oracle.recording.uncompiled import blame_compiler
from proctor.oracle.store import Recording
from proctor.oracle.testing import assert_equivalent

Compile = Callable[[nn.Module], nn.Module]

PROGRAM = """
import sys
import torch
from torch import nn

how, first = sys.argv[1], sys.argv[2]
torch.set_num_threads(1)

def spoilt(graph, inputs):
    for node in graph.graph.nodes:
        if "gelu" in str(node.target):
            node.kwargs = {"approximate": "tanh"}
    graph.recompile()
    return graph

def broken(graph, inputs):
    raise RuntimeError("no compiler here")

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 8), Block(), Block())
if how != "no":
    for i in range(int(first), 3):
        net[i].compile(backend={"spoilt": spoilt, "broken": broken}.get(how, how), fullgraph=True)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net(torch.linspace(-2, 2, 64).view(8, 8)).square().mean().backward()
optimizer.step()
"""


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def trusted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference(tmp_path_factory.mktemp("trusted") / "reference", Deep(), steps=2)


class Deep(Net):
    """The net with a block of its own inside."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))

    def forward(self, x: Any) -> Any:
        return super().forward(self.block(x))


def wrapped(net: nn.Module) -> nn.Module:
    return torch.compile(net, backend="aot_eager", fullgraph=True)  # type: ignore[no-any-return]


def in_place(net: nn.Module) -> nn.Module:
    net.compile(backend="eager", fullgraph=True)
    return net


def by_forward(net: nn.Module) -> nn.Module:
    net.forward = torch.compile(net.forward, backend="eager", fullgraph=True)
    return net


def by_block(net: nn.Module) -> nn.Module:
    net.block = torch.compile(net.block, backend="eager", fullgraph=True)
    return net


@pytest.mark.parametrize(("compile_it", "inside"), [(wrapped, 5), (in_place, 5), (by_forward, 5), (by_block, 2)])
def test_a_compiled_model_is_seen_at_its_edges(tmp_path: Path, trusted: Path, compile_it: Compile, inside: int) -> None:
    net = Deep()
    model = compile_it(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch._dynamo.utils.counters.clear()
    with proctor.oracle.trace(model, tmp_path / "r", steps=2):
        for _ in range(2):
            step(model, optimizer)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1 and not torch._dynamo.utils.counters["graph_break"]
    verdict = proctor.oracle.compare(trusted, tmp_path / "r")
    assert verdict.verdict == "equivalent", verdict.reason
    assert len(verdict.unchecked) == 1 and f"of {inside} modules" in verdict.unchecked[0], verdict.unchecked
    edges = {(t.name, t.kind) for t in verdict.tensors}
    assert {("", "output"), ("", "grad_output"), ("first.weight", "main_grad")} <= edges
    assert (("block", "grad_output") in edges) == (inside == 2)


def test_a_compiled_function_around_the_model_and_the_update_hides_neither(tmp_path: Path, trusted: Path) -> None:
    net = Deep()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loss = torch.compile(lambda rows: net(rows).square().mean(), backend="eager", fullgraph=True)
    update = torch.compile(lambda: optimizer.step(), backend="eager")
    with proctor.oracle.trace(net, tmp_path / "r", steps=2):
        for _ in range(2):
            optimizer.zero_grad()
            loss(batch()).backward()
            update()
    verdict = proctor.oracle.compare(trusted, tmp_path / "r")
    assert verdict.verdict == "equivalent", verdict.reason
    kinds = {t.kind for t in verdict.tensors}
    assert {"main_grad", "param_after"} <= kinds and "output" not in kinds


def spoilt(graph: Any, inputs: Any) -> Any:
    """A backend that has another gelu."""
    for node in graph.graph.nodes:
        if "gelu" in str(node.target):
            node.kwargs = {"approximate": "tanh"}
    graph.recompile()
    return graph


@pytest.mark.parametrize("twist", [1.0, 1.5])
def test_the_compiler_is_blamed_only_if_the_eager_run_is_right(tmp_path: Path, twist: float) -> None:
    class Outer(nn.Module):
        def __init__(self, twist: float = 1.0) -> None:
            super().__init__()
            self.inner = Net(twist=twist)
            self.head = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return self.head(self.inner(x))

    class Again:
        def once(self, run: str, *, generate: int | None) -> None:
            train(run)

    def train(run: str) -> None:
        net = Outer(twist)
        net.inner.compile(backend=spoilt)
        with proctor.oracle.trace(net, tmp_path / "r", run=run):
            step(net, torch.optim.SGD(net.parameters(), lr=0.1))

    trusted = Recording(reference(tmp_path / "reference", Outer()))
    train("clean")
    made = Recording(tmp_path / "r")
    comparison = Comparison(trusted, made)
    found = comparison.run()
    culprit, said, _ = blame_compiler(comparison, found, Again())  # type: ignore[arg-type]
    assert found.verdict == "different"
    if twist == 1.0:
        assert culprit is not None and (culprit.module, culprit.direction) == ("inner", "forward") and said.endswith("is equivalent")
    else:
        assert culprit is None and "different as well" in said


@pytest.mark.slow
def test_what_the_compiler_spoilt_is_its_own_and_nothing_else(tmp_path: Path) -> None:
    command = program(tmp_path, PROGRAM)[:2]
    plain = [*command, "no", "0"]
    assert_equivalent(plain, [*command, "aot_eager", "1"])
    with pytest.raises(AssertionError, match="CULPRIT  2\n") as caught:
        assert_equivalent(plain, [*command, "spoilt", "2"])
    assert "compiled region 2 gives another result; eager, the candidate is equivalent" in " ".join(str(caught.value).split())
    assert_equivalent(plain, [*command, "spoilt", "2"], eager=True)


@pytest.mark.slow
def test_a_compiler_that_fails_is_said_and_done_without(tmp_path: Path) -> None:
    command = [*program(tmp_path, PROGRAM)[:2], "broken", "1"]
    info = Recorder(tmp_path / "out", command, samples=0).record()
    assert any("torch.compile failed" in n and "no compiler here" in n for n in info.notes), info.notes
    assert not Recording(tmp_path / "out").ranks()[0].info.compiled


@pytest.mark.slow
def test_a_compiled_program_as_a_reference_is_the_eager_one(tmp_path: Path) -> None:
    command = program(tmp_path, PROGRAM)[:2]
    Recorder(tmp_path / "out", [*command, "spoilt", "1"], samples=1).record()
    made = Recording(tmp_path / "out")
    assert made.runs() == ["again", "clean", "eager", "noise-0"] and made.trusted == "eager"
    assert made.ranks()[0].info.compiled == ["1", "2"] and not made.ranks("eager")[0].info.compiled
    assert proctor.oracle.compare(tmp_path / "out", tmp_path / "out").verdict == "different"
