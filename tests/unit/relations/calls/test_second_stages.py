"""A second stage of a program is looked at as its first one is; two results of one function that hold the same are told."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.trained import record

pytest.importorskip("torch")

from proctor.invariants.invariant import Hypothesis
from proctor.invariants.relations import registry
from proctor.invariants.trace import Trace

PROGRAMS = {
    "stages": """
        def first(model):
            optimizer = torch.optim.SGD(model.parameters(), 0.01)
            for step in range(70):
                optimizer.zero_grad()
                model(torch.randn(8, 6)).square().mean().backward()
                optimizer.step()
        def second(model, critic):
            mine, its = torch.optim.SGD(model.parameters(), 0.01), torch.optim.SGD(critic.parameters(), 0.01)
            for step in range(24):
                x = torch.randn(8, 6)
                its.zero_grad()
                F.binary_cross_entropy_with_logits(critic(model(x).detach()), torch.zeros(8, 1)).backward()
                its.step()
                mine.zero_grad()
                truth = torch.zeros(8, 1) if BUG == "labels" else torch.ones(8, 1)
                F.binary_cross_entropy_with_logits(critic(model(x)), truth).backward()
                mine.step()
        model, critic = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 1)
        first(model)
        second(model, critic)
    """,
    "batches": """
        text = torch.randint(0, 50, (400, 4))
        def get_batch(i):
            n = min(9, len(text) - 1 - i)
            later = 0 if BUG == "unshifted" else 1
            return text[i : i + n], text[i + later : i + later + n].view(-1)
        model = nn.Sequential(nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(16):
            data, target = get_batch(9 * step)
            optimizer.zero_grad()
            F.cross_entropy(model(data).view(-1, 50), target).backward()
            optimizer.step()
    """,
}
WRONG = {
    ("stages", "labels"): {"__main__.second: it uses zeros (place 2), too", "__main__.second: it does not use ones, which comes right behind"},
    ("batches", "unshifted"): {"result[0] of __main__.get_batch: it holds the same as another result", "result[1] of __main__.get_batch: it holds the same as another result"},
}
RELATION = registry()["manner"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stages")
    record(folder, PROGRAMS, [*((program, *how) for program in PROGRAMS for how in (("own", 1, 8, ""), ("right", 2, 8, ""))), *((program, bug, 2, 8, bug) for program, bug in WRONG)])
    return folder


def failed(runs: Path, program: str, name: str) -> list[str]:
    known: list[Hypothesis] = RELATION.propose(Trace.load([runs / f"{program}-own"]))
    trace = Trace.load([runs / f"{program}-{name}"])
    rows = RELATION.examples(trace, known).frame
    assert rows.height
    return [f"{d.function}: {d.seen}" if not d.seen.startswith("result") else d.seen for row in rows.filter(~rows["passed"]).to_dicts() for d in (RELATION.detail(trace, known[row["hyp"]], row),)]


@pytest.mark.parametrize(("program", "bug"), list(WRONG))
def test_what_is_wrong_is_told_by_its_cause(runs: Path, program: str, bug: str) -> None:
    said = failed(runs, program, bug)
    assert all(any(text.startswith(wanted) for text in said) for wanted in WRONG[program, bug]), said


@pytest.mark.parametrize("program", list(PROGRAMS))
def test_another_seed_breaks_nothing(runs: Path, program: str) -> None:
    assert failed(runs, program, "right") == []


def test_titles_are_short(runs: Path) -> None:
    said = failed(runs, "stages", "labels")
    assert said and all(len(text.rpartition(" (")[0] or text) < 120 for text in said), said
