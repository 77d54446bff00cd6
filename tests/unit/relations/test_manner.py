"""Manners that a program keeps in its healthy runs, and one wrong line breaks: rules of one run, on runs of another seed and size."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from helpers.runs import write_run
from helpers.trained import record

from proctor.infer.engine import infer
from proctor.instrument.config import RecordConfig
from proctor.instrument.probes import Sink
from proctor.instrument.probes._anew import Anew
from proctor.instrument.probes._cuts import AT, BEHIND, Cuts
from proctor.instrument.probes._words import words
from proctor.instrument.probes.beside import Beside
from proctor.instrument.probes.graphs import kinds_of
from proctor.instrument.probes.manners import Manners
from proctor.invariants.invariant import Hypothesis, Standing
from proctor.invariants.relations import registry
from proctor.invariants.trace import Trace
from proctor.native import Recorder

PROGRAMS = {
    "program": """
        import numpy
        class Scaler(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, loss):
                ctx.save_for_backward(loss)
                return x.clone()
            @staticmethod
            def backward(ctx, grad):
                return grad, torch.ones_like(ctx.saved_tensors[0])
        class Attention(nn.Module):
            def __init__(self):
                super().__init__()
                self.qkv, self.norm = nn.Linear(WIDTH, 3 * WIDTH), nn.BatchNorm1d(6)
            def forward(self, x, mask=None):
                q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
                weights = F.softmax(q @ k.transpose(1, 2) if mask is None else (q @ k.transpose(1, 2)).masked_fill(~mask, -9), dim=1 if BUG == "dimension" else -1)
                if BUG == "thrown":
                    Scaler.apply(weights, 0.01 * weights.square().mean())
                else:
                    weights = Scaler.apply(weights, 0.01 * weights.square().mean())
                return x + weights @ v
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.table, self.attention, self.out = nn.Embedding(9, WIDTH), Attention(), nn.Linear(WIDTH, 9)
            def forward(self, ids, mask):
                return self.out(self.attention(self.table(ids), None if BUG == "mask" else mask))
        class Average:
            def __init__(self, model):
                self.decay, self.updates = 0.9, 0
                self.shadow = [p.detach().clone() for p in model.parameters()]
            def update(self, model):
                self.updates += 1
                rate = min(self.decay, self.updates / (4 + self.updates))
                if BUG == "rate":
                    self.decay = rate
                for s, p in zip(self.shadow, model.parameters()):
                    s.lerp_(p.detach(), 1 - rate)
        def weigh(noise):
            return noise / (noise + 1) if BUG != "share" else noise / noise + 1
        def normalised(scores):
            copy = scores if BUG == "place" else scores.clone()
            return copy.sub_(copy.mean())
        def ahead_of(size):
            return torch.full((size, size), float("-inf")).triu(2 if BUG == "wide" else 1)
        def joined(first, second):
            return torch.cat([first, first if BUG == "joined" else second])
        def annealed(x, weight):
            return x * weight
        def act(state):
            return state.tanh()
        def distance(output, target):
            return (output - target).square().mean()
        def stored(queue, rows):
            return torch.cat([queue, rows.detach()])[-8:]
        class Dropped(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(WIDTH, 1)
            def forward(self, x):
                return self.layer(F.dropout(x, 0.1, training=self.training or BUG == "always"))
        class Recurrent(nn.Module):
            def __init__(self):
                super().__init__()
                self.cell = nn.LSTM(WIDTH, WIDTH)
            def forward(self, x, state):
                output, state = self.cell(x, state)
                return output, state if BUG == "unstopped" else tuple(h.detach() for h in state)
        class Views(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(WIDTH, 2)
            def forward(self, first, second):
                return self.layer(first) - self.layer(second)
        def recurrent(x, state):
            return [tuple(torch.tanh(h + x) for h in layer) for layer in state]
        def labels_of(ids):
            labels = ids.clone()
            if BUG != "padding":
                labels[:, 4:] = -100
            return labels
        class Lion(torch.optim.Optimizer):
            def __init__(self, params):
                super().__init__(params, dict(lr=1e-3))
            @torch.no_grad()
            def step(self):
                for p in self.param_groups[0]["params"]:
                    state = self.state[p]
                    if not state:
                        state["moment"] = torch.zeros_like(p)
                    grad = p.grad + 0.1 * p if BUG == "decay" else p.grad
                    state["moment"].lerp_(grad, 0.1)
                    p.mul_(0.9999).sub_(state["moment"].sign(), alpha=1e-3)
        def loss_of(scores, labels):
            return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-100)
        model = Net()
        optimizer, average = Lion(model.parameters()), Average(model)
        target = Net().requires_grad_(False)
        target.attention.norm.eval()
        student, teacher = (nn.Sequential(nn.Linear(WIDTH, 4), nn.Dropout(0.1)) for _ in range(2))
        dropped, lstm, hidden, views = Dropped(), Recurrent(), None, Views()
        seen = torch.rand(1, 3)
        table, order, ranker = torch.rand(40, 6), torch.arange(40), nn.Linear(6, 1)
        queue, state = torch.zeros(8, 9), [(torch.zeros(4, WIDTH), torch.zeros(4, WIDTH))]
        for epoch in range(3):
            if BUG != "unshuffled":
                order = torch.randperm(40)
            for part in order.split(4):
                ranker(table[part]).sum().backward()
        for step in range(16):
            ids = torch.randint(0, 9, (8, 6))
            mask = torch.ones(6, 6).tril().bool()
            if BUG != "awake":
                model.attention.norm.eval()
            with torch.no_grad():
                (model if BUG == "alias" else target)(ids, mask)
            noise = weigh(torch.rand(16) * 9 + 0.1)
            centred = normalised(torch.rand(16))
            scores, _ = model(ids, mask), ahead_of(WIDTH)
            queue = stored(queue, scores[:, 0] if BUG == "attached" else scores[:, 0].detach())
            new = recurrent(torch.rand(4, WIDTH), state)
            state = state if BUG == "forgets" else [tuple(h.clone() for h in layer) for layer in new]
            output, new = lstm(torch.rand(3, 4, WIDTH), hidden)
            hidden = None if BUG == "resets" else tuple(h.detach() for h in new)
            for training in (True, False):
                dropped.train(training)
                with torch.set_grad_enabled(training):
                    dropped(torch.rand(4, WIDTH))
            first = torch.rand(4, WIDTH)
            joined(first, first + torch.rand(4, WIDTH))
            for part in range(4):
                annealed(first, numpy.float64(0.1) * (part if BUG == "anew" else 4 * step + part))
            seen = seen if BUG == "still" else torch.rand(1, 3)
            act(seen)
            track = torch.rand(8, 5, 3)
            if step % 8 == 2:
                with torch.no_grad():
                    distance(torch.rand(8, 4, 3), track[:, :-1])
            distance(torch.rand(8, 4, 3), track[:, :-1] if BUG == "unshifted" else track[:, 1:])
            views(first, first.clone() if BUG == "twice" else first + 0.1)
            student(images := torch.rand(4, 3, WIDTH)).sum().backward()
            if BUG == "stale" and step == 0:
                teacher.eval()
            with torch.no_grad():
                teacher(images if BUG == "view" else images + 0.1 * torch.rand(4, 3, WIDTH))
            loss_of(scores, labels_of(ids)).mul(noise.mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            if BUG != "skipped":
                average.update(model)
            if step % 4 == 3:
                model.eval()
                with torch.no_grad():
                    model(ids if BUG == "leak" else torch.randint(0, 9, (8, 6)), mask)
                model.train()
    """,
}
WRONG = {
    "mask": ("given", "Attention.forward"), "dimension": ("told", "softmax"), "skipped": ("each", "Average.update"), "awake": ("mode", "BatchNorm1d"), "thrown": ("made", "Scaler"),
    "share": ("holds", "weigh"), "padding": ("holds", "labels_of"), "place": ("leaves", "normalised"), "rate": ("steady", "decay"), "decay": ("moment", "Lion"),
    "wide": ("holds", "right behind the diagonal"), "attached": ("holds", "no gradients flow"), "forgets": ("holds", "a later call is given it"), "twice": ("holds", "forward of __main__.Views, argument 0: it is none of the other arguments"), "unstopped": ("holds", "forward of __main__.Recurrent, result[1][0]: no gradients flow"), "resets": ("holds", "<model>.forward of __main__.Recurrent"),
    "unshifted": ("holds", "distance, argument target: it begins behind the beginning of what it is cut from"), "unshuffled": ("holds", "put together anew"),
    "anew": ("holds", "argument weight: it does not begin anew"),
    "joined": ("holds", "its halves along the first dimension differ"), "still": ("holds", "argument state: it is another than in the call before"),
    "always": ("told", "while the model is evaluated"), "stale": ("beside", "in evaluation mode"), "view": ("beside", "given what it was given itself"), "leak": ("unseen", "not trained on"), "alias": ("beside", "only the Net that trains"),
}  # fmt: skip
RELATION = registry()["manner"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("manner")
    record(folder, PROGRAMS, [*(("program", bug, 0, 8, bug) for bug in WRONG), ("program", "own", 1, 12, ""), ("program", "right", 0, 8, "")])
    return folder


def rules(run: Path) -> list[Hypothesis]:
    return RELATION.propose(Trace.load([run / "program-own"]))


def failed(run: Path, known: list[Hypothesis]) -> list[tuple[str, str]]:
    trace = Trace.load([run])
    frame = RELATION.examples(trace, known).frame
    told = []
    for row in frame.filter(~frame["passed"]).to_dicts():
        detail = RELATION.detail(trace, known[row["hyp"]], row)
        told.append((known[row["hyp"]].text("mode"), f"{detail.function} {detail.variable} {detail.expected} | {detail.seen}"))
        assert detail.function and detail.seen and detail.advice
    return told


@pytest.mark.parametrize("bug", list(WRONG))
def test_one_wrong_line_breaks_a_manner_and_its_function_is_named(runs: Path, bug: str) -> None:
    mode, name = WRONG[bug]
    said = failed(runs / f"program-{bug}", rules(runs))
    assert any(m == mode and name in text for m, text in said), said


def test_another_seed_and_size_keep_all_manners(runs: Path) -> None:
    known = rules(runs)
    assert {h.text("mode") for h in known} >= {mode for mode, _ in WRONG.values()}
    assert failed(runs / "program-right", known) == []


def test_manners_are_habits_of_their_program(runs: Path) -> None:
    assert all(RELATION.standing_of(h) is Standing.HABIT and h.text("family") for h in rules(runs))


def test_ranks_that_draw_the_same_noise_break_a_manner_of_ranks_that_do_not(tmp_path: Path) -> None:
    def run(name: str, same: bool) -> Trace:
        def rank(rank: int) -> dict[str, object]:
            values = [{"kind": "rng", "place": "step torch", "step": step, "fp": 1 + step + (0 if same else 100 * rank)} for step in range(1, 6)]
            calls = [{"fn": "torch.optim.Optimizer.step", "step": step} for step in range(6)]
            return {"rank": rank, "world": 2, "calls": calls, "values": values, "family": "__main__.Net"}

        return Trace.load([write_run(tmp_path / name, [rank(0), rank(1)])])

    known = [Hypothesis.of("manner", mode="ranks", what="torch", family=RELATION.propose(run("own", False))[0].text("family"))]
    healthy, wrong = (RELATION.examples(run(name, name == "wrong"), known).frame for name in ("right", "wrong"))
    assert healthy["passed"].all() and healthy.height and not wrong["passed"].any() and wrong.height


def test_of_what_one_healthy_run_leaves_open_no_rule_is_made_and_none_is_broken(tmp_path: Path) -> None:
    word = "it is another than in the call before"

    def run(name: str, **said: str) -> Path:
        calls = [{"fn": "__main__.boxes", "step": step} for step in range(6)]
        meta = {"mode": "holds", "has": "", "lacks": ""} | said
        values = [{"kind": "manner", "place": "__main__.boxes, argument right", "step": step, "meta": meta} for step in (1, 2)]
        return write_run(tmp_path / name, [{"calls": calls, "values": values, "family": "__main__.Net"}])

    told, left_open = run("told", has=word), run("open", open=word)
    (known,) = RELATION.propose(Trace.load([told]))
    assert known.text("what").endswith(word)
    assert RELATION.settle(RELATION.merge([RELATION.survey(Trace.load([path])) for path in (told, left_open)])) == []
    assert RELATION.examples(Trace.load([left_open]), [known]).frame.is_empty()


def test_halves_are_the_same_where_something_was_joined_and_not_where_a_model_collapsed() -> None:
    rows, sources, word = torch.rand(4, 6), torch.rand(3, 1, 8), "its halves along the {} dimension differ"
    assert word.format("first") in words(torch.cat([rows, rows]))[1]
    assert word.format("first") in words(torch.cat([rows, rows + 1]))[0]
    assert not any("first" in said for side in words(rows[:1].repeat(8, 1)) for said in side)
    assert word.format("second") in words(torch.cat([sources, sources], 1))[1]
    assert not any("second" in said for side in words(torch.cat([sources, sources], 1).requires_grad_()) for said in side)
    views = torch.rand(2, 3, 1, 8, requires_grad=True)  # two views of three samples, as a model gave them
    assert word.format("second") in words(torch.cat([views[0], views[1]], 1))[0]
    assert word.format("second") in words(torch.cat([views[0], views[0]], 1))[1]
    collapsed = views[:, :1].expand(2, 3, 1, 8)[0]
    assert word.format("second") not in words(torch.cat([collapsed, collapsed], 1))[1]


def test_words_are_said_where_they_are_clear_alone() -> None:
    share = torch.linspace(0.1, 0.9, 16)
    assert words(share) == (["it has more than one value", "it lies within 0 and 1", "it is not negative"], [])
    assert words(share + 2)[1] == ["it lies within 0 and 1"]
    nearly = torch.cat([share, torch.tensor([1.1])])  # one of many says nothing
    assert words(nearly) == (["it has more than one value", "it is not negative"], [])
    assert "its rows sum to 1" in words(torch.rand(4, 6).softmax(1))[0] and "its rows sum to 1" in words(torch.rand(4, 6).softmax(0))[1]
    assert words(torch.ones(16))[1] == ["it has more than one value"] and words(torch.ones(3)) == ([], [])


def test_operations_of_a_graph_leave_out_what_sizes_decide() -> None:
    x = torch.ones(2, 3, 4, requires_grad=True)
    both = [kinds_of([torch.nn.functional.linear(v, torch.ones(4, 4, requires_grad=True)).tanh().sum().grad_fn]) for v in (x, x[0])]
    assert both[0] == both[1] == {"Tanh", "Sum"}


class _Batch:
    def __init__(self) -> None:
        self.share = 0.5

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"{name} was asked for by the probe")


def test_an_object_whose_numbers_are_watched_is_not_kept_alive_and_none_of_its_code_runs() -> None:
    probe, batch = Manners(Sink(Recorder(), lambda: 0, RecordConfig(run="run"), lambda: True)), _Batch()
    gone = weakref.ref(batch)
    probe._meet(batch, f"{__name__}._Batch.__init__")
    probe._hold(batch)
    assert probe._objects[id(batch)].numbers == {"share": 0.5}
    del batch
    assert gone() is None


def test_what_a_later_call_is_given_is_learned_from_one_run(runs: Path) -> None:
    rules = infer(Trace.load([runs / "program-own"]), [RELATION])[0]
    assert {"__main__.recurrent, result[0][0]: a later call is given it", "__main__.Net: another of its class, which it does not train"} <= {r.hypothesis.text("what") for r in rules}


def test_what_runs_beside_is_not_told_where_steps_are_left_out() -> None:
    probe = Beside(Sink(Recorder(), lambda: 0, RecordConfig(run="run"), lambda: True))
    probe.thinned()
    probe._called((torch.nn.Linear(2, 2), torch.ones(1, 2)), None)
    assert not probe._trained


def test_where_a_view_begins_is_told_of_what_is_cut_at_one_place() -> None:
    def told(views: list[torch.Tensor]) -> list[tuple[str, str, str]]:
        cuts = Cuts()
        return [said for view in views * 2 for said in cuts.told("f", [("x", view, 0)])]

    data = torch.rand(8, 6, 2)
    assert told([data[i : i + 2, 1:] for i in range(4)]) == [("x", BEHIND, AT)]
    assert told([data[i : i + 2, :-1] for i in range(4)]) == [("x", AT, BEHIND)]
    assert told([data[:, i : i + 3] for i in (1, 2, 1, 3)]) == told([data[:, 1:].clone()] * 4) == told([data.transpose(0, 1)[1:]] * 4) == told([data.detach()] * 4) == []


def test_batches_that_come_again_are_told_behind_several_and_what_a_step_uses_twice_is_not() -> None:
    def told(batches: list[set[int]]) -> list[bool]:
        anew = Anew()
        return [said for batch in batches for said in [anew.meets(batch)] if said is not None]

    epoch, other = [[set(range(start + i, 24, 6)) for i in range(6)] for start in (0, 0)], [set(range(4 * i, 4 * i + 4)) for i in range(6)]
    assert told([*epoch[0], *epoch[1], *epoch[0]]) == [False, False, False]
    assert told([*epoch[0], *other]) == [True]
    assert told([batch for batch in epoch[0] for _ in range(3)]) == told(epoch[0][:2] * 8) == []
