"""Functions that are called again and again, though not in each step: one that is never called is told, with the line at which healthy runs call it."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.trained import record

pytest.importorskip("torch")

from proctor.invariants.invariant import Hypothesis
from proctor.invariants.relations import registry
from proctor.invariants.trace import Trace

PROGRAMS = {
    "program": """
        import copy, random
        random.seed(SEED)
        model = nn.Linear(6, WIDTH)
        target = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        def soft_update(net, copied):
            with torch.no_grad():
                for p, q in zip(net.parameters(), copied.parameters()):
                    q.lerp_(p, 0.1)
        def seldom():
            return SEED
        def set_up():
            return WIDTH
        def train_step(step):
            x = torch.randn(8, 6)
            loss = (model(x) - target(x).detach()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 2 == (2 if BUG == "never" else 0):
                soft_update(model, target)
            if random.random() < 0.05:
                seldom()
        set_up()
        for step in range(20 if BUG == "short" else 40):
            train_step(step)
    """,
}
RELATION = registry()["manner"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("often")
    record(folder, PROGRAMS, [("program", "own", 1, 8, ""), *(("program", bug, 2, 12, bug) for bug in ("right", "never", "short"))])
    return folder


def rules(runs: Path) -> list[Hypothesis]:
    return [h for h in RELATION.propose(Trace.load([runs / "program-own"])) if h.text("mode") == "often"]


def test_a_function_of_each_second_step_is_one(runs: Path) -> None:
    assert [RELATION.say(h).partition(", in programs")[0] for h in rules(runs)] == ["__main__.soft_update is called again and again in the first 32 steps"]


@pytest.mark.parametrize(("run", "failing"), [("never", 1), ("right", 0), ("short", 0)])
def test_it_is_told_where_it_is_never_called(runs: Path, run: str, failing: int) -> None:
    trace, known = Trace.load([runs / f"program-{run}"]), rules(runs)
    rows = RELATION.examples(trace, known).frame
    bad = rows.filter(~rows["passed"]).to_dicts()
    assert len(bad) == failing
    for row in bad:
        detail = RELATION.detail(trace, known[row["hyp"]], row)
        assert detail.seen == "__main__.soft_update is never called in the first 32 steps" and detail.function == "__main__.soft_update"
    assert rows.height == {"never": 1, "right": 3, "short": 0}[run]
