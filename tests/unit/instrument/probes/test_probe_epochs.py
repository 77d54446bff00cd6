"""What functions use that train for several updates, before the first of them, and in steps that begin within a call: rules of one run, on runs with one wrong line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from helpers.trained import record

from proctor.instrument.config import RecordConfig
from proctor.instrument.probes import Home, Sink
from proctor.instrument.probes.operations import Operations
from proctor.invariants.invariant import Hypothesis
from proctor.invariants.relations import registry
from proctor.invariants.schema import MODEL_CALL
from proctor.invariants.trace import Trace
from proctor.native import Recorder

PROGRAMS = {
    "program": """
        def train_both(x, weights):
            for _ in range(1):
                loss = critic(x).square().mean()
                critics.zero_grad()
                loss.backward()
                critics.step()
            loss = (actor(x)[:, 0] * weights).mean()
            actors.zero_grad()
            loss.backward()
            actors.step()
        def scaled(weights):
            return (weights - weights.mean()) / (1 if BUG == "unscaled" else weights.std())
        def learn(x, weights):
            weights = scaled(weights)
            for _ in range(3):
                order = torch.randperm(len(x))
                x, weights = x[order].clone(), weights.clone() if BUG == "unordered" else weights[order].clone()
                for i in range(len(x) // 4):
                    part = slice(4 * i, 4 * i + 4)
                    rows, heavy = x[part], weights[part]
                    if BUG == "live":
                        heavy = actor(rows)[:, 0].detach()
                    train_both(rows, heavy)
        actor, critic = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 1)
        actors, critics = torch.optim.SGD(actor.parameters(), 0.01), torch.optim.SGD(critic.parameters(), 0.01)
        for epoch in range(6):
            learn(torch.randn(WIDTH, WIDTH), torch.rand(WIDTH))
    """,
}
RELATION = registry()["manner"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("epochs")
    record(folder, PROGRAMS, [*(("program", bug, 0, 8, bug) for bug in ("unordered", "live", "unscaled")), ("program", "own", 1, 12, ""), ("program", "right", 0, 8, "")])
    return folder


def rules(runs: Path) -> list[Hypothesis]:
    return [h for h in RELATION.propose(Trace.load([runs / "program-own"])) if h.text("mode") in ("uses", "then", "only")]


def failed(run: Path, known: list[Hypothesis]) -> list[tuple[str, str]]:
    trace = Trace.load([run])
    frame = RELATION.examples(trace, known).frame
    rows = [(known[row["hyp"]], row) for row in frame.filter(~frame["passed"]).to_dicts()]
    return [(RELATION.say(h), f"{d.function} {d.seen}") for h, row in rows for d in (RELATION.detail(trace, h, row),)]


def test_a_line_before_the_first_update_of_an_epoch_is_named(runs: Path) -> None:
    said = failed(runs / "program-unordered", rules(runs))
    assert ("__main__.learn", "comes before") in [(text.partition(" ")[0], "comes before") for _, text in said if "clone (place 2) comes before an index (place 2)" in text], said
    assert any(rule.startswith("__main__.learn, up to its first update, uses __getitem__ (place 2) and then clone (place 2)") for rule, _ in said), said
    # the order is what is left of it: a use is left out, and is said first
    assert all("it lacks an index (place 4) of healthy runs, and what follows may have other places: " in text for _, text in said if "comes before" in text), said


def test_what_it_calls_before_is_looked_at_as_a_whole(runs: Path) -> None:
    said = [text for _, text in failed(runs / "program-unscaled", rules(runs))]
    assert any("scaled it does not use std" in text for text in said), said


def test_a_call_in_which_steps_began_is_not_told_as_new_where_they_begin_before_it(runs: Path) -> None:
    said = [text for _, text in failed(runs / "program-live", rules(runs))]
    more = [text for text in said if "learn" in text.partition(" ")[0] and text.endswith(", too")]
    assert any("detach" in text for text in more), said
    assert not any("train_both()" in text for text in more), said


def test_another_seed_and_size_use_the_same(runs: Path) -> None:
    assert failed(runs / "program-right", rules(runs)) == []


def test_what_is_first_called_when_training_goes_on_is_looked_at_until_a_model_evaluates_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # other tests of this process may have compiled
    if dynamo is not None:
        monkeypatch.setattr(dynamo, "cached_backends", {1: None})
    watch = Operations(Sink(Recorder(), lambda: 0, RecordConfig(run="run"), lambda: True))
    before, after = watch.hooks("program.evaluate", Home.USER)
    model_begins, _ = watch.hooks(MODEL_CALL, Home.TORCH)
    updates, _ = watch.hooks("torch.optim.Optimizer.step", Home.TORCH)
    assert before is not None and after is not None and model_begins is not None and updates is not None
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    for _ in range(3):
        updates((optimizer,), None)
    before((), None)
    assert len(torch.overrides._get_current_function_mode_stack()) == 1
    model_begins((torch.nn.Linear(2, 2).eval(),), None)
    assert len(torch.overrides._get_current_function_mode_stack()) == 0
    after((), None, None, False)
