"""What a function of the program is given by each of those that call it (`manner`, `given`)."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.trained import record

pytest.importorskip("torch")

from proctor.invariants.relations import registry
from proctor.invariants.trace import Trace

PROGRAMS = {
    "translates": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 6)
            def forward(self, x, answers, help=0.5):
                return self.second(self.first(x).relu()) + help * answers
        def train(model, optimizer):
            for _ in range(6):
                x = torch.randn(16, 6)
                optimizer.zero_grad()
                F.mse_loss(model(x, x), x).backward()
                optimizer.step()
        def evaluate(model):
            with torch.no_grad():
                for _ in range(3):
                    x = torch.randn(16, 6)
                    F.mse_loss(model(x, x) if BUG == "helped" else model(x, x, help=0.0), x)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for epoch in range(4):
            train(model, optimizer)
            evaluate(model)
    """,
}


def test_an_argument_that_one_caller_always_gives_is_missed_where_it_falls_back_to_its_default(tmp_path: Path) -> None:
    record(tmp_path, PROGRAMS, [("translates", name, seed, width, "helped" if name == "helped" else "") for name, seed, width in (("right", 0, 8), ("other", 1, 12), ("helped", 0, 8))])
    manner = registry()["manner"]
    right, other, helped = (Trace.load([tmp_path / f"translates-{name}"]) for name in ("right", "other", "helped"))
    rules = [h for h in manner.propose(right) if h["mode"] == "given" and "help" in h.text("what")]
    assert [manner.say(rule).partition(", in programs")[0] for rule in rules] == ["__main__.Net.forward, called by __main__.evaluate, is given argument help"]
    assert manner.examples(other, rules).frame["passed"].all() and manner.examples(other, rules).frame.height
    failed = manner.examples(helped, rules).frame.filter(~manner.examples(helped, rules).frame["passed"])
    detail = manner.detail(helped, rules[0], failed.row(0, named=True))
    assert (detail.seen, detail.variable) == ("argument help is None or not given", "help")
