"""`frozen`, and buffers of one module of several (`fresh`): what a program does to kinds of parameters and buffers, learned from its healthy form."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.trained import record

pytest.importorskip("torch")

from proctor.invariants.relations import registry
from proctor.invariants.trace import Trace

PROGRAMS = {
    "layers": """
        class Layer(nn.Module):
            def __init__(self, counts):
                super().__init__()
                self.fc, self.norm, self.counts = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), counts
                self.register_buffer("load", torch.zeros(3))
            def forward(self, x):
                return self.norm(self.fc(x))
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers, self.head = nn.ModuleList(Layer(i > 0) for i in range(3)), nn.Linear(WIDTH, 3)
            def forward(self, x):
                for layer in self.layers:
                    x = layer(x)
                return self.head(x)
        model = Net()
        for layer in model.layers:
            layer.fc.requires_grad_(False)
            if BUG != "norms":
                layer.norm.requires_grad_(False)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1e-2)
        for step in range(8):
            x = torch.randn(8, WIDTH)
            F.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for layer in model.layers:
                    if not layer.counts:
                        if BUG == "ends":
                            break
                        continue
                    layer.load += 1
    """,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kinds")
    record(folder, PROGRAMS, [("layers", bug or "right", seed, 8, bug) for seed, bug in ((0, ""), (1, "again"), (0, "norms"), (0, "ends"))])
    return folder


def broken(folder: Path, relation: str, bug: str) -> set[str]:
    """Rules of the healthy run that another one breaks."""
    of = registry()[relation]
    healthy, other = (Trace.load([folder / f"layers-{name}"]) for name in ("right", bug))
    rules = of.propose(healthy)
    seen = of.examples(healthy, rules).frame
    held = set(range(len(rules))) - set(seen.filter(~seen["passed"])["hyp"].to_list())
    found = of.examples(other, rules).frame
    return {of.say(rules[i]) for i in found.filter(~found["passed"])["hyp"].to_list() if i in held}


def test_a_kind_that_was_frozen_does_not_train(runs: Path) -> None:
    said = broken(runs, "frozen", "norms")
    assert len(said) == 2 and all("LayerNorm" in text for text in said)  # weights and biases
    assert not broken(runs, "frozen", "again")


def test_a_buffer_that_moves_in_some_layers_has_a_rule_for_each(runs: Path) -> None:
    said = broken(runs, "fresh", "ends")
    assert {text.partition(" changes")[0] for text in said} == {f"__main__.Layer.load of layers.{i}" for i in (1, 2)}
    assert not broken(runs, "fresh", "again")
