"""Stages that share parameters, several stages on a rank, and 1F1B: what one device trains."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from proctor.errors import OracleError
from proctor.oracle import Plan
from proctor.oracle.parallel import parallelize, run_threads
from proctor.oracle.plans.plan_toml import format_plan, plan_of

VOCABULARY, WIDTH, LAYERS = 24, 8, 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x).tanh()


class Tied(nn.Module):
    """A language model whose head is its embedding, and which gives its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        said = {"logits": logits}
        if targets is not None:
            said["loss"] = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return said


def model() -> Tied:
    torch.manual_seed(0)
    return Tied()


TWO = (r"embedding|layers\.[01]", r"layers\.[23]|head")
THREE = (r"embedding", r"layers\.\d", r"head")
FOUR = (r"embedding|layers\.0", r"layers\.1", r"layers\.2", r"layers\.3|head")


def data(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(0, VOCABULARY, (8, 5), generator=generator) for _ in range(2)) for _ in range(steps)]  # type: ignore[misc]


def train(plan: Plan | None, start: dict[str, torch.Tensor], accumulate: int = 1, factor: float = 1.0):
    one = Tied()
    one.load_state_dict(start)
    if plan is not None:
        parallelize(one, plan, seed=0)
    optimizer = torch.optim.AdamW(one.parameters(), lr=0.05)
    said = []
    for number, (tokens, targets) in enumerate(data(4)):
        loss = one(tokens, targets)["loss"]
        (loss * factor).backward()
        if (number + 1) % accumulate == 0:
            norm = nn.utils.clip_grad_norm_(one.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            said.append((loss.item(), norm.item()))
    return said, one.state_dict(), {name for name, _ in one.named_parameters(remove_duplicate=False)}


def same(found, wanted) -> None:
    (said, state, _), (losses, expected, _) = found, wanted
    assert said == [(pytest.approx(loss, abs=2e-6), pytest.approx(norm, abs=2e-5)) for loss, norm in losses]
    assert list(state) == list(expected)
    assert all(torch.allclose(state[name], expected[name], atol=5e-6) for name in expected)
    assert torch.equal(state["head.weight"], state["embedding.weight"])


@pytest.mark.parametrize(
    ("mesh", "stages", "microbatches", "schedule"),
    [
        ("pp=2", TWO, 1, "gpipe"),
        ("pp=3", THREE, 2, "gpipe"),
        ("pp=2,dp=2", TWO, 4, "gpipe"),
        ("pp=2", TWO, 4, "1f1b"),
        ("pp=3", THREE, 4, "1f1b"),
        ("pp=2,dp=2", TWO, 2, "1f1b"),
        ("pp=1", TWO, 4, "1f1b"),
        ("pp=2", FOUR, 2, "gpipe"),
        ("pp=2", FOUR, 4, "1f1b"),
    ],
)
def test_a_head_that_is_the_embedding_trains_as_on_one_device(mesh, stages, microbatches, schedule):
    plan = Plan(mesh).pipeline(*stages, axis="pp", microbatches=microbatches, schedule=schedule)
    if "dp" in mesh:
        plan.redistribute("", at="input", dst={"dp": 0}).redistribute("", at="output", src={"dp": "partial-avg"}, slot="loss")
        plan.redistribute("", at="output", src={"dp": 0}, slot="logits").pending(".*", "dp")
    start = model().state_dict()
    ranks = run_threads(lambda rank: train(plan, start), plan.mesh.world)
    wanted = train(None, start)
    for found in ranks:
        same(found, wanted)
    holders = [rank for rank, (_, _, names) in enumerate(ranks) if "head.weight" in names]
    if "pp=1" not in mesh:
        assert 0 < len(holders) < plan.mesh.world


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_gradients_of_several_backwards_add_up_and_a_factor_of_the_loss_counts(schedule):
    plan = Plan("pp=3").pipeline(*THREE, axis="pp", microbatches=2, schedule=schedule)
    start = model().state_dict()
    wanted = train(None, start, accumulate=2, factor=0.5)
    for found in run_threads(lambda rank: train(plan, start, accumulate=2, factor=0.5), 3):
        same(found, wanted)


def test_1f1b_keeps_the_graphs_of_the_stages_that_follow_and_no_more():
    start = model().state_dict()
    most: dict[tuple[str, int], int] = {}

    def rank(number: int, schedule: str) -> None:
        plan = Plan("pp=2").pipeline(*TWO, axis="pp", microbatches=4, schedule=schedule)
        one = Tied()
        one.load_state_dict(start)
        own = one.layers[0 if number == 0 else 2].inner
        parallelize(one, plan, seed=0)
        alive = itertools.count()
        open_now: set[int] = set()

        def forward(module, args, output):
            call = next(alive)
            open_now.add(call)
            most[schedule, number] = max(most.get((schedule, number), 0), len(open_now))
            output.register_hook(lambda gradient: open_now.discard(call))

        own.register_forward_hook(forward)
        one(*data(1)[0])["loss"].backward()
        assert not open_now

    for schedule in ("gpipe", "1f1b"):
        run_threads(lambda number, schedule=schedule: rank(number, schedule), 2)
    assert most == {("gpipe", 0): 4, ("gpipe", 1): 4, ("1f1b", 0): 2, ("1f1b", 1): 1}


def test_without_gradients_1f1b_computes_forwards_only():
    plan = Plan("pp=2").pipeline(*TWO, axis="pp", microbatches=4, schedule="1f1b")
    start = model().state_dict()
    tokens, _ = data(1)[0]

    def rank(number: int) -> torch.Tensor:
        one = Tied()
        one.load_state_dict(start)
        with torch.no_grad():
            return parallelize(one, plan, seed=0)(tokens)["logits"]

    one = Tied()
    one.load_state_dict(start)
    for logits in run_threads(rank, 2):
        assert torch.allclose(logits, one(tokens)["logits"], atol=1e-6)


def test_1f1b_of_a_model_without_a_loss_is_refused():
    plan = Plan("pp=2").pipeline(*TWO, axis="pp", schedule="1f1b")
    with pytest.raises(OracleError, match="a model that gives its loss"):
        run_threads(lambda rank: parallelize(model(), plan, seed=0)(data(1)[0][0]), 2)


def test_a_schedule_is_in_the_file_and_one_that_nobody_knows_is_refused(tmp_path):
    plan = Plan("pp=2").pipeline(*TWO, axis="pp", microbatches=4, schedule="1f1b")
    (tmp_path / "plan.toml").write_text(format_plan(plan))
    assert plan_of(tmp_path / "plan.toml").pipelines == plan.pipelines
    with pytest.raises(OracleError, match="schedule is 'zigzag'"):
        Plan("pp=2").pipeline(*TWO, axis="pp", schedule="zigzag")


class Sometimes(nn.Module):
    """Its second layer is used where it is said to be."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = self.a(x)
        return self.b(x) if both else x


def test_a_gradient_that_a_backward_does_not_add_to_is_not_reduced_again():
    torch.manual_seed(0)
    start = Sometimes()  # once: the ranks are threads, and draw from one generator

    def rank(number: int | None):
        one = copy.deepcopy(start)
        if number is not None:
            parallelize(one, Plan("dp=2").style("batch", "", "dp"), seed=0)
        for both in (True, False):
            one(torch.arange(16.0).reshape(4, 4), both).square().mean().backward()
        return {name: p.grad for name, p in one.named_parameters()}

    wanted = rank(None)
    for found in run_threads(rank, 2):
        assert all(torch.allclose(found[name], wanted[name], rtol=1e-5) for name in wanted)
