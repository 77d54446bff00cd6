"""Modes of `stays` on what is done when it is too late, or of one sample alone (`late`, `sample`, `order`), on parameters of a loss (`forgotten`) and orders that nothing reads (`unused`); an average that forgets itself in some steps (`average`), and switches of layers (`manner`)."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.trained import failed_of, record, trace_of

from proctor.infer.engine import infer
from proctor.invariants.invariant import Hypothesis
from proctor.invariants.relations import registry
from proctor.invariants.trace import Trace

pytest.importorskip("torch")

PROGRAMS = {
    "terms": """
        net = nn.Sequential(nn.Linear(5, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        def penalty():
            return 0.01 * sum(p.square().sum() for p in net.parameters())
        class Trainer:
            loss = None
            def step(self, x):
                self.loss = F.mse_loss(net(x), torch.ones(8, 2))
                self.loss.backward()
                if BUG == "attribute":
                    self.loss = self.loss + penalty()
                optimizer.step()
        def update(x):
            loss = F.mse_loss(net(x), torch.ones(8, 2))
            if BUG in ("right", "before"):
                loss = loss + penalty()
            if BUG == "twice":
                loss.backward(retain_graph=True)
                loss = loss + penalty()
            loss.backward()
            if BUG == "in_place":
                loss += penalty()
            if BUG == "anew":
                loss = loss + penalty()
            if BUG == "part":
                extra = penalty()
                extra.backward()
                loss = loss + extra
            if BUG == "data":
                loss = loss + 0.1 * x.sum()
            if BUG == "detached":
                loss = loss + penalty().detach()
            if BUG == "other":
                loss = F.mse_loss(net(x + 1), torch.ones(8, 2))
            optimizer.step()
            if BUG == "behind":
                loss = loss + penalty()
            return loss
        trainer, total = Trainer(), 0
        for step in range(4):
            x = torch.randn(8, 5)
            optimizer.zero_grad()
            if BUG in ("attribute", "object"):
                trainer.step(x)
            else:
                total = total + update(x)
    """,
    "sequences": """
        class Reader(nn.Module):
            def __init__(self):
                super().__init__()
                kind = {"gru": nn.GRU, "gru_last": nn.GRU}.get(BUG, nn.LSTM)
                self.rnn = kind(5, WIDTH, num_layers=2, batch_first=BUG not in ("places_first", "gru", "turned"))
                self.last = nn.Linear(WIDTH, 3)
            def forward(self, x):
                if BUG == "turned":
                    return self.last(self.rnn(x.transpose(0, 1))[0][-1])
                out, state = self.rnn(x)
                if BUG in ("places_first", "right", "gru", "gru_last"):
                    return self.last(out[:, -1])
                if BUG == "row":
                    return self.last(out[-1])
                if BUG == "loop":
                    return self.last(torch.stack([one[-1] for one in (out[i] for i in range(len(x)))]))
                if BUG == "state":
                    return self.last(state[0][-1])
                return self.last(out.mean(1))
        net = Reader()
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        for step in range(4):
            x = torch.randn(1 if BUG == "row1" else 7, 7, 5)
            target = torch.zeros(7, dtype=torch.long)
            optimizer.zero_grad()
            F.cross_entropy(net(x), target[:1] if BUG == "row1" else target).backward()
            optimizer.step()
    """,
    "losses": """
        class Scaled(nn.Module):
            def __init__(self):
                super().__init__()
                self.scale, self.shift = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(-1.0))
                if BUG == "fixed":
                    self.scale.requires_grad_(False), self.shift.requires_grad_(False)
            def forward(self, x, y):
                return F.mse_loss(self.scale * x + self.shift, y)
        net, loss = nn.Linear(6, WIDTH), Scaled()
        judge = nn.Linear(WIDTH, 3)
        optimizer = torch.optim.SGD([*net.parameters(), *(loss.parameters() if BUG == "held" else ())], 0.01)
        second = torch.optim.SGD(loss.parameters(), 0.01) if BUG == "second" else None
        for step in range(24):
            optimizer.zero_grad()
            if BUG in ("cleared", "second"):
                loss.zero_grad()
            x = torch.randn(8, 6)
            value = judge(net(x)).square().mean() if BUG == "judge" else loss(net(x), torch.ones(8, WIDTH))
            value.backward()
            if BUG == "clipped":
                nn.utils.clip_grad_norm_(loss.parameters(), 1e-3)
            optimizer.step()
            if BUG == "by_hand":
                with torch.no_grad():
                    for p in loss.parameters():
                        p -= 0.01 * p.grad
            if second is not None:
                second.step()
    """,
    "orders": """
        import random
        net = nn.Linear(5, 2)
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        def update(x, y):
            order = random.sample(range(8), 8)
            back = list(order)
            for i, j in enumerate(order):
                back[j] = i
            return F.mse_loss(net(x[order])[order], y)
        def restores(x, y):
            order = random.sample(range(8), 8)
            back = list(order)
            for i, j in enumerate(order):
                back[j] = i
            return F.mse_loss(net(x[order])[back], y)
        def forgets(x, y):
            order = torch.randperm(8)
            return F.mse_loss(net(x), y)
        def shuffled(x, y):
            order = torch.randperm(8)
            return F.mse_loss(net(x[order]), y[order])
        def sorts(x, y):
            lengths = x.sum(1)
            values, order = lengths.sort()
            return F.mse_loss(net(x), y)
        def counts(x, y):
            kinds = [0] * 8
            for i in range(8):
                kinds[i] = i % 3
            return F.mse_loss(net(x), y)
        for step in range(4):
            x, y = torch.randn(8, 5), torch.randn(8, 2)
            optimizer.zero_grad()
            loss = {"unread": update, "back": restores, "idle": forgets, "sorts": sorts, "counts": counts}.get(BUG, shuffled)(x, y)
            loss.backward()
            optimizer.step()
    """,
    "sorted": """
        from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
        class Captions(nn.Module):
            def __init__(self):
                super().__init__()
                self.words, self.look = nn.Embedding(20, 6), nn.Linear(5, WIDTH)
                self.rnn, self.last = nn.GRU(6, WIDTH, batch_first=True), nn.Linear(WIDTH, 20)
            def read(self, ids, lengths):
                packed = pack_padded_sequence(self.words(ids), lengths, batch_first=True)
                return pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=9)[0]
        class Mixed(Captions):
            def forward(self, picture, ids, lengths):
                lengths, order = lengths.sort(descending=True)
                ids = ids[order]
                picture = picture.view(len(picture), -1) if BUG == "viewed" else picture
                return self.last(self.read(ids, lengths) + self.look(picture)[:, None]), ids, order
        class Both(Captions):
            def forward(self, picture, ids, lengths):
                lengths, order = lengths.sort(descending=True)
                ids = ids[order]
                picture = picture[order]
                return self.last(self.read(ids, lengths) + self.look(picture)[:, None]), ids, order
        class Back(Captions):
            def forward(self, picture, ids, lengths):
                lengths, order = lengths.sort(descending=True)
                ids = ids[order]
                out = self.read(ids, lengths)[order.argsort()]
                return self.last(out + self.look(picture)[:, None]), ids[order.argsort()], order
        class Later(Captions):
            def forward(self, picture, ids, lengths):
                seen = self.look(picture)
                lengths, order = lengths.sort(descending=True)
                ids = ids[order]
                return self.last(self.read(ids, lengths) + seen[order][:, None]), ids, order
        net = {"both": Both, "back": Back, "later": Later}.get(BUG, Mixed)()
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        for step in range(4):
            lengths = torch.randperm(7) + 3
            ids = torch.randint(1, 20, (7, 9)) * (torch.arange(9) < lengths[:, None])
            picture = torch.ones(7, 5) if BUG == "alike" else torch.randn(7, 5)
            scores, targets, _ = net(picture, ids, lengths)
            optimizer.zero_grad()
            F.cross_entropy(scores.reshape(-1, 20), (targets.reshape(-1) + 1) % 20, ignore_index=1).backward()
            optimizer.step()
    """,
    "targets": """
        import copy
        net = nn.Linear(5, WIDTH)
        target = copy.deepcopy(net)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        rate = {"swapped": 0.95, "slow": 0.05, "copied": 1.0}.get(BUG)
        for step in range(32):
            x = torch.randn(8, 5)
            optimizer.zero_grad()
            (net(x) - 1 - 0.9 * target(x).detach()).square().mean().backward()
            optimizer.step()
            if step % 4 == 3:
                share = rate or max(0.1, 0.92 - 0.1 * (step // 4))
                with torch.no_grad():
                    for mine, theirs in zip(target.parameters(), net.parameters()):
                        mine.copy_(share * theirs + (1 - share) * mine)
    """,
    "layers": """
        class Reader(nn.Module):
            def __init__(self):
                super().__init__()
                self.table = nn.Embedding(9, WIDTH, padding_idx=None if BUG == "padding" else 0)
                self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=BUG != "places_first")
                self.blocks = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3 if SEED > 1 else 2)])
                self.last = nn.Linear(WIDTH, 3, bias=BUG != "bias")
            def forward(self, ids):
                return self.last(self.blocks(self.rnn(self.table(ids))[0]).mean(1))
        net = Reader()
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        for step in range(12):
            optimizer.zero_grad()
            F.cross_entropy(net(torch.randint(9, (8, 7))), torch.randint(3, (8,))).backward()
            optimizer.step()
    """,
}
_ADDED = "something that depends on parameters is added to {0} between its backward and the update, and no backward begins at it"
_ONE = "loss: of what a recurrent layer gives for 7 samples and 7 places, one sample alone is used"
WRONG = {
    ("terms", "in_place"): ("late", "loss: " + _ADDED.format("loss")),
    ("terms", "anew"): ("late", "loss: " + _ADDED.format("loss")),
    ("terms", "attribute"): ("late", "self.loss: " + _ADDED.format("self.loss")),
    ("sequences", "places_first"): ("sample", _ONE),
    ("sequences", "row"): ("sample", _ONE),
    ("sequences", "gru"): ("sample", _ONE),
    ("losses", "left_out"): ("forgotten", "scale: scale and 1 more of Scaled: no optimizer holds what this loss has of its own"),
    ("losses", "clipped"): ("forgotten", "scale: scale and 1 more of Scaled: no optimizer holds what this loss has of its own"),
    ("orders", "unread"): ("unused", "back: no line of __main__.update reads back, an order of 8 things"),
    ("sorted", "mixed"): ("order", "picture: __main__.Mixed.forward puts ids into the order of order, and not picture, which has as many rows (7) and is read behind"),
    ("sorted", "viewed"): ("order", "picture: __main__.Mixed.forward puts ids into the order of order, and not picture, which has as many rows (7) and is read behind"),
    ("orders", "idle"): ("unused", "order: no line of __main__.forgets reads order, an order of 8 things"),
}
MODES = ("late", "sample", "forgotten", "unused", "order")
RIGHT = [
    *(("terms", manner) for manner in ("right", "part", "twice", "data", "detached", "other", "behind", "object")),
    *(("sequences", manner) for manner in ("right", "turned", "loop", "state", "mean", "gru_last")),
    *(("losses", manner) for manner in ("held", "second", "cleared", "by_hand", "judge", "fixed")),
    *(("sorted", manner) for manner in ("both", "back", "later", "alike")),
    *(("orders", manner) for manner in ("back", "right", "sorts", "counts")),
]
SWITCHES = {"places_first": "batch_first is on", "padding": "padding_idx is given", "bias": "bias is given"}
AVERAGES = ("swapped", "slow", "copied", "warm")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("late")
    record(folder, PROGRAMS, [*((program, bug, 0, 8, bug) for program, bug in [*WRONG, *RIGHT, *(("layers", bug) for bug in SWITCHES)]), *(("layers", name, seed, 8, "") for seed, name in enumerate("abc"))])
    for bug in AVERAGES:  # models of one process are copies of each other
        record(folder, {"targets": PROGRAMS["targets"]}, [("targets", bug, 0, 8, bug)])
    return folder


@pytest.mark.parametrize(("program", "bug"), list(WRONG))
def test_what_is_late_alone_or_left_is_told(runs: Path, program: str, bug: str) -> None:
    mode, text = WRONG[program, bug]
    told = failed_of("stays", mode, runs / f"{program}-{bug}")
    assert told and all(one.startswith(text) for one in told)
    assert not any(failed_of("stays", other, runs / f"{program}-{bug}") for other in MODES if other != mode)


@pytest.mark.parametrize(("program", "manner"), RIGHT)
def test_who_is_in_time_breaks_none(runs: Path, program: str, manner: str) -> None:
    assert not any(failed_of("stays", mode, runs / f"{program}-{manner}") for mode in MODES)


def test_an_average_that_forgets_itself_in_each_fourth_step_is_told(runs: Path) -> None:
    rule = Hypothesis.of("average", mode="keeps", what="copy")

    def failed(name: str) -> list[str]:
        found = registry()["average"].examples(trace_of(runs / f"targets-{name}"), [rule]).frame
        return list(found.filter(~found["passed"])["_seen"])

    told = failed("swapped")
    assert told and told[0].startswith("it goes 0.95 of the way to the model")
    assert not failed("slow") and not failed("copied") and not failed("warm")


def test_a_switch_of_a_layer_that_is_another_is_told(runs: Path) -> None:
    rules = [i.hypothesis for i in infer(Trace.load([runs / "layers-a", runs / "layers-b"]), [registry()["manner"]])[0] if i.hypothesis["mode"] == "layers"]

    def failed(name: str) -> set[str]:
        trace = trace_of(runs / f"layers-{name}")
        return {h.text("what") for h in rules if not registry()["manner"].examples(trace, [h]).frame["passed"].all()}

    assert failed("c") == set()
    for bug, switch in SWITCHES.items():
        told = failed(bug)
        assert len(told) == 1 and next(iter(told)).endswith(switch)
