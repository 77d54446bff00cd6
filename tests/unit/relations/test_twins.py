"""`contain`: of several models of one class that get gradients an optimizer holds each, if it holds one; and all parameters of a layer."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from helpers.trained import record

pytest.importorskip("torch")

from proctor.invariants.invariant import Hypothesis
from proctor.invariants.relations.contain import EventContain
from proctor.invariants.relations.contain.change_words import STEP
from proctor.invariants.trace import Trace

PROGRAMS = {
    "critics": """
        class Critic(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.head = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 1)
            def forward(self, x):
                return self.head(F.relu(self.body(x)))
        first, second = Critic(), Critic()
        if BUG == "copy":
            second.load_state_dict(first.state_dict())
        if BUG == "judge":
            second.eval()
        if BUG == "frozen":
            second.requires_grad_(False)
        held = [*first.parameters(), *(second.parameters() if BUG == "" else ())]
        optimizer = torch.optim.Adam(held, 1e-2)
        for step in range(6):
            x = torch.randn(16, 6)
            loss = sum(F.mse_loss(critic(x), x[:, :1]) for critic in (first, second))
            loss.backward()
            optimizer.step()
            if BUG == "by hand":
                with torch.no_grad():
                    for p in second.parameters():
                        p -= 0.1 * p.grad
            first.zero_grad(), second.zero_grad()
    """,
    "each": """
        model, optimizers = nn.Sequential(nn.Linear(6, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)), {}
        for step in range(6):
            x = torch.randn(16, 6)
            model.zero_grad()
            F.mse_loss(model(x), x[:, :1]).backward()
            for name, p in model.named_parameters():
                if BUG == "forgotten" and name == "2.bias":
                    continue
                if name not in optimizers:
                    optimizers[name] = torch.optim.SGD([p], 0.1)
                optimizers[name].step()
    """,
}
TWIN = Hypothesis.of("contain", kind="change", role="parameter", parent=STEP, attr="data", who="twin")
RIGHT = ["", "copy", "judge", "frozen", "by hand"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("twins")
    record(folder, PROGRAMS, [*(("critics", bug or "right", 0, 8, bug) for bug in ["forgotten", *RIGHT]), *(("each", bug or "right", 0, 8, bug) for bug in ("", "forgotten"))])
    return folder


def told(run: Path) -> pl.DataFrame:
    return EventContain().examples(Trace.load([run]), [TWIN]).frame.filter(pl.col("passed").is_not_null())


def test_a_model_that_no_optimizer_holds_is_named_beside_one_of_its_class(runs: Path) -> None:
    bad = told(runs / "critics-forgotten").filter(~pl.col("passed"))
    assert set(bad["_name"]) == {f"Critic#2.{name}" for name in ("body.weight", "body.bias", "head.weight", "head.bias")}


@pytest.mark.parametrize("manner", RIGHT)
def test_right_manners_pass(runs: Path, manner: str) -> None:
    assert told(runs / f"critics-{manner or 'right'}").filter(~pl.col("passed")).is_empty()


def test_the_right_program_had_something_to_fail_on(runs: Path) -> None:
    assert {str(name).partition(".")[0] for name in told(runs / "critics-right")["_name"]} == {"body", "head", "Critic#2"}


def test_an_optimizer_for_each_parameter_may_be_made_in_the_first_update(runs: Path) -> None:
    rules = [Hypothesis.of("contain", kind="change", role="parameter", parent=STEP, attr="data", who=who) for who in ("module", "held")]
    right, forgotten = (EventContain().examples(Trace.load([runs / f"each-{name}"]), rules).frame for name in ("right", "forgotten"))
    assert right.filter(pl.col("passed")).height and not right.filter(~pl.col("passed")).height
    assert forgotten.filter(~pl.col("passed"))["hyp"].unique().sort().to_list() == [0, 1]
