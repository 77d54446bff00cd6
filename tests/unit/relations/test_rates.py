"""Options of an optimizer: what falls behind its warmup neither stays at the top nor goes back, and an option that reaches it is not 0."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from helpers.trained import record

from proctor.infer.engine import infer
from proctor.invariants.invariant import Hypothesis
from proctor.invariants.relations import registry
from proctor.invariants.trace import Trace

PROGRAMS = {
    "program": """
        model = nn.Linear(WIDTH, 1)
        model.named, model.other = nn.Linear(1, 1), nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.0 if BUG == "unset" else 0.5 + WIDTH / 100)
        def rate(update):
            if BUG == "again":
                update = update % 8
            warm = min(1.0, (update + 1) / 5)
            if BUG == "stays" and update >= 4:
                return 1.0
            if BUG == "plateau":
                return warm if update < 12 else 0.9 ** (update - 11)
            if BUG == "waves":
                return 0.5 + abs(update % 6 - 3) / 10
            return warm if update < 5 else 0.9 ** (update - 4)
        for update in range(20 if BUG != "short" else 4):
            for group in optimizer.param_groups:
                group["lr"] = 0.1 * rate(update)
            optimizer.zero_grad()
            model(torch.randn(4, WIDTH)).mean().backward()
            optimizer.step()
    """,
}
RELATION = registry()["paced"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rates")
    record(folder, PROGRAMS, [("program", how or "right", 0, 6, how) for how in ("", "again", "stays", "plateau", "waves", "short", "unset")] + [("program", "other", 1, 9, "")])
    return folder


def rules(run: Path) -> dict[str, Hypothesis]:
    return {h.text("mode"): h for h in RELATION.propose(Trace.load([run])) if h.text("mode") in ("falls", "peaks")}


def failed(run: Path, known: dict[str, Hypothesis]) -> dict[str, str]:
    trace, told = Trace.load([run]), list(known.values())
    frame = RELATION.examples(trace, told).frame
    rows = [(told[row["hyp"]], row) for row in frame.filter(~frame["passed"]).to_dicts()]
    return {h.text("mode"): RELATION.detail(trace, h, row).seen for h, row in reversed(rows)}


def test_a_rate_that_goes_back_or_stays_at_the_top_is_told(runs: Path) -> None:
    known = rules(runs / "program-right")
    assert set(known) == {"falls", "peaks"}
    assert failed(runs / "program-again", known)["falls"] == "0.04 after 0.02, and it had fallen before"
    assert failed(runs / "program-stays", known) == {"peaks": "0.1 after 0.08, and no change in the 4 updates behind it"}


@pytest.mark.parametrize("how", ["right", "short"])
def test_the_same_schedule_over_another_length_is_told_nothing(runs: Path, how: str) -> None:
    assert failed(runs / f"program-{how}", rules(runs / "program-right")) == {}


def test_plateaus_and_waves_teach_no_course(runs: Path) -> None:
    assert set(rules(runs / "program-plateau")) == {"falls"}
    assert set(rules(runs / "program-waves")) <= {"peaks"}


def test_an_option_that_does_not_reach_its_optimizer_is_told(runs: Path) -> None:
    relation = registry()["option"]
    known = [h for h in relation.propose(Trace.load([runs / "program-other"])) if h.text("mode") == "some"]
    assert [relation.say(h) for h in known] == ["momentum of SGD is not 0 in all its groups, in programs of named,other, torch.nn.Linear"]
    wrong, right = (Trace.load([runs / f"program-{name}"]) for name in ("unset", "right"))
    rows = relation.examples(wrong, known).frame.filter(~pl.col("passed")).to_dicts()
    assert {relation.detail(wrong, known[0], row).seen for row in rows} == {"momentum is 0 in all groups of #0"}
    assert relation.examples(right, known).frame["passed"].all()


def test_they_are_learned_from_one_run(runs: Path) -> None:
    trace = Trace.load([runs / "program-right"])
    assert {r.hypothesis.text("mode") for r in infer(trace, [RELATION, registry()["option"]])[0]} >= {"falls", "peaks", "some"}
