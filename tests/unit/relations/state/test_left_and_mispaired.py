"""Modes of `stays` on what a program computes, fills or changes and then leaves (`unused`, `filled`, `rate`), and on parts that are paired wrongly (`twice`, `sorted`, `padding`, `shown`); and frozen numbers beside an output layer (`contain`)."""

from __future__ import annotations

import types
import weakref
from pathlib import Path

import pytest
from helpers.trained import failed_of, record, trace_of

from proctor.instrument.config import RecordConfig
from proctor.instrument.probes import Sink
from proctor.instrument.probes._wasted import Wasted, wasted
from proctor.instrument.probes.filled import Filled
from proctor.instrument.probes.packed import Packed
from proctor.instrument.probes.shown import Shown
from proctor.instrument.probes.unread import Unread, _read
from proctor.invariants.invariant import Hypothesis
from proctor.invariants.relations import registry
from proctor.native import Recorder

pytest.importorskip("torch")

PROGRAMS = {
    "computed": """
        net = nn.Linear(5, 2)
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        def mask(result, which):
            return result[which]
        def right(x, y):
            out = net(x)
            high, low = y > 0, y <= 0
            first = mask(out, high)
            second = mask(out, low)
            return F.mse_loss(first, torch.ones_like(first)) + F.mse_loss(second, torch.zeros_like(second))
        def twin(x, y):
            out = net(x)
            high, low = y > 0, y <= 0
            first = mask(out, high)
            second = mask(out, low)
            return F.mse_loss(first, torch.ones_like(first)) + F.mse_loss(first, torch.zeros_like(first))
        def term(x, y):
            loss = F.mse_loss(net(x), torch.ones(8, 2))
            penalty = net.weight.square().sum()
            optimizer.zero_grad()
            return F.l1_loss(net(x), torch.ones(8, 2)) + loss
        def listed(x, y):
            kept = []
            for part in x.chunk(4):
                kept.append(net(part))
            return F.mse_loss(net(x), torch.ones(8, 2))
        def joined(x, y):
            kept = []
            for part in x.chunk(4):
                kept.append(net(part))
            return F.mse_loss(torch.cat(kept), torch.ones(8, 2))
        def by_product(x, y):
            out = net(x)
            one = net.weight[:1, :1] * 2
            return F.mse_loss(net(x + 1), torch.ones(8, 2))
        def renamed(x, y):
            out = net(x)
            score = out
            return F.mse_loss(out, torch.ones(8, 2))
        def named(x, y):
            _penalty = net.weight.square().sum()
            return F.mse_loss(net(x), torch.ones(8, 2))
        def data(x, y):
            mean = mask(x, y > 0).sum()
            other = mask(x, y <= 0).sum()
            return F.mse_loss(net(x - mean), torch.ones(8, 2))
        def unpacked(x, y):
            left, right = net(x).chunk(2, 1)
            return F.mse_loss(left, torch.ones(8, 1))
        def taken(x, y):
            parts = net(x).chunk(2, 1)
            left = parts[0]
            right = parts[1]
            return F.mse_loss(left, torch.ones(8, 1))
        def numbers(x, y):
            losses = []
            losses.append(net(x).sum().item())
            losses.append(1.0)
            return F.mse_loss(net(x), torch.ones(8, 2))
        update = {"renamed": renamed}.get(BUG) or globals().get(BUG) or right
        for step in range(4):
            loss = update(torch.randn(8, 5), torch.arange(8) % 3 - 1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """,
    "parts": """
        net = nn.Linear(5, 1)
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        def batch(step):
            now = torch.randn(8, 5)
            after = now.clone() if BUG == "same" or (BUG == "once" and step == 1) else now if BUG == "alias" else torch.randn(8, 5)
            if BUG == "flat":
                now, after = torch.ones(8, 5), torch.ones(8, 5)
            return now, torch.randn(8, 1), torch.randn(8), after
        def learn(step):
            state, action, reward, after = batch(step)
            if BUG == "idle":
                state, action, reward, other = state, action, reward, state.clone()
            loss = (net(state) - reward[:, None] - net(after).detach() * action).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for step in range(6):
            learn(step)
    """,
    "sequences": """
        from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
        class Tagger(nn.Module):
            def __init__(self):
                super().__init__()
                self.words, self.rnn, self.last = nn.Embedding(20, 6), nn.GRU(6, WIDTH, batch_first=True), nn.Linear(WIDTH, 20)
            def forward(self, ids, lengths):
                order = lengths.argsort(descending=True)
                if BUG == "whole":
                    return self.last(self.rnn(self.words(ids))[0])
                packed = pack_padded_sequence(self.words(ids[order]), lengths[order], batch_first=True)
                out = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=ids.shape[1])[0]
                return self.last(out if BUG in ("unsorted", "targets") else out[order.argsort()])
        net = Tagger()
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        for step in range(4):
            lengths = torch.randperm(8) + 2
            ids = torch.randint(1, 20, (8, 10)) * (torch.arange(10) < lengths[:, None])
            target = (ids + 1) % 20 * (ids > 0)
            if BUG == "targets":
                target = target[lengths.argsort(descending=True)]
            scores = net(ids, lengths)
            ignored = -100 if BUG in ("padding", "whole") else 0
            loss = F.cross_entropy(scores.transpose(1, 2), target, ignore_index=ignored) if BUG == "classes" else F.cross_entropy(scores.reshape(-1, 20), target.reshape(-1), ignore_index=ignored)
            if BUG == "weighed":
                loss = (F.cross_entropy(scores.reshape(-1, 20), target.reshape(-1), reduction="none") * (target.reshape(-1) > 0)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """,
    "hidden": """
        class Words(nn.Module):
            def __init__(self):
                super().__init__()
                self.words, self.last = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 20)
            def forward(self, ids, places=None):
                hidden = self.words(ids) + self.words(ids).mean(1, keepdim=True)
                return self.last(hidden if places is None else hidden.gather(1, places[..., None].expand(-1, -1, WIDTH)))
        net = Words()
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        for step in range(4):
            ids = torch.randint(1, 19, (8, 12))
            places = torch.stack([torch.randperm(12)[:3] for _ in range(8)])
            wanted = ids.gather(1, places)
            if BUG == "padded":
                ids = ids * (torch.arange(12) < 5)
            shown = ids if BUG in ("shown", "shown_beside", "all", "padded") else ids.scatter(1, places, 19)
            if BUG in ("beside", "shown_beside"):
                loss = F.cross_entropy(net(shown, places).reshape(-1, 20), wanted.reshape(-1))
            else:
                target = ids.masked_fill(ids == 0, -100) if BUG == "padded" else ids.clone() if BUG == "all" else torch.full_like(ids, -100).scatter(1, places, wanted)
                loss = F.cross_entropy(net(shown).reshape(-1, 20), target.reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """,
    "states": """
        torch.manual_seed(7)
        net = nn.Sequential(nn.Linear(5, WIDTH), nn.Linear(WIDTH, 1))
        other = nn.Sequential(nn.Linear(5, WIDTH), nn.Linear(WIDTH, 1))
        state = net.state_dict()
        for name, value in other.state_dict().items():
            state[name] = state[name].clone() if BUG == "copied" else torch.zeros_like(value) if BUG == "room" else value
        if BUG == "loaded":
            net.load_state_dict(state)
        if BUG == "part":
            net.load_state_dict({name: value for name, value in state.items()})
        if BUG == "teacher":
            third = nn.Sequential(nn.Linear(5, WIDTH), nn.Linear(WIDTH, 1))
            third.load_state_dict(state)
        optimizer = torch.optim.SGD((other if BUG == "rests" else net).parameters(), 0.01)
        for step in range(3):
            optimizer.zero_grad()
            (other if BUG == "rests" else net)(torch.randn(8, 5)).square().mean().backward()
            optimizer.step()
    """,
    "rates": """
        net = nn.Linear(5, 1)
        class Options:
            rate = 0.0
        def train():
            rate, options = 0.01, Options()
            options.rate = 0.01
            if BUG == "attribute":
                optimizer = torch.optim.SGD(net.parameters(), lr=options.rate)
            else:
                optimizer = torch.optim.SGD(net.parameters(), lr=rate)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if BUG == "scheduled" else None
            for step in range(60):
                optimizer.zero_grad()
                net(torch.randn(8, 5)).square().mean().backward()
                optimizer.step()
                if step == 9:
                    rate = rate / 10
                    options.rate /= 10
                    if BUG == "anew":
                        optimizer = torch.optim.SGD(net.parameters(), lr=rate)
                    if BUG == "given":
                        for group in optimizer.param_groups:
                            group["lr"] = rate
                    if BUG == "scheduled":
                        scheduler.step()
                if BUG == "back" and step == 20:
                    rate = 0.01
        def asks():
            rate = 0.01
            optimizer = torch.optim.SGD(net.parameters(), lr=rate)
            for step in range(60):
                known = locals()
                optimizer.zero_grad()
                net(torch.randn(8, 5)).square().mean().backward()
                optimizer.step()
                assert known["optimizer"] is optimizer  # nobody clears what it was given
                rate = 0.001
        def plain():
            rate = 0.01
            optimizer = torch.optim.SGD(net.parameters(), lr=rate)
            rate = 5.0
            for step in range(60):
                optimizer.zero_grad()
                net(torch.randn(8, 5)).square().mean().backward()
                optimizer.step()
        {"before": plain, "asks": asks}.get(BUG, train)()
    """,
    "margins": """
        class Scores(nn.Module):
            def __init__(self):
                super().__init__()
                self.margin = nn.Parameter(torch.tensor([6.0]), requires_grad=False)
                self.items, self.kinds = nn.Parameter(torch.randn(9, WIDTH)), nn.Parameter(torch.randn(3, WIDTH))
                if BUG == "frozen":
                    self.items.requires_grad_(False)
            def forward(self, item, kind):
                return self.margin.item() - (self.items[item] - self.kinds[kind]).norm(p=1, dim=1)
        net = Scores()
        optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=0.01)
        for step in range(4):
            optimizer.zero_grad()
            F.softplus(-net(torch.randint(9, (16,)), torch.randint(3, (16,)))).mean().backward()
            optimizer.step()
    """,
}
_OF = "no line of __main__"
WRONG = {
    ("computed", "twin"): ("unused", f"second: {_OF}.twin reads second, which depends on parameters, while first, which is made in the same way, is read"),
    ("computed", "term"): ("unused", f"penalty: {_OF}.term reads penalty, a single number that depends on parameters"),
    ("computed", "listed"): ("unused", f"kept: {_OF}.listed reads kept, a list of results that depend on parameters"),
    ("parts", "same"): ("twice", "after: after holds what state holds, number by number, in __main__.learn, which takes both out of one batch"),
    ("sequences", "unsorted"): ("sorted", "target: results come in another order than their targets"),
    ("sequences", "padding"): ("padding", "target: places of padding count in the loss: 28 of 72 targets are 0, which the sequences end in, and of these places the model gives one and the same result"),
    ("hidden", "shown"): ("shown", "target: the model is given the words that it is to tell: at all 24 places of 96 that have a target the input holds it"),
    ("hidden", "shown_beside"): ("shown", "target: the model is given the words that it is to tell: at all 24 places of 96 that have a target the input holds it"),
    ("states", "left"): ("filled", "0.weight: the program has put other values into a state of Sequential, such as 0.weight (3 of 4 parameters), and has not loaded it: state_dict() gives a table, and Sequential trains from what it was before"),
    ("rates", "variable"): ("rate", "rate: rate, of which SGD was given 0.01 as its rate, has been 0.001 for 32 updates, and SGD still trains with 0.01: nobody gave it the new one"),
    ("rates", "attribute"): ("rate", "options.rate: options.rate, of which SGD was given 0.01 as its rate, has been 0.001 for 32 updates, and SGD still trains with 0.01: nobody gave it the new one"),
}
MODES = ("unused", "twice", "sorted", "padding", "shown", "filled", "rate")
RIGHT = [
    *(("computed", manner) for manner in ("right", "joined", "by_product", "renamed", "named", "data", "unpacked", "taken", "numbers")),
    *(("parts", manner) for manner in ("right", "once", "alias", "flat", "idle")),
    *(("sequences", manner) for manner in ("right", "targets", "whole", "weighed", "classes")),
    *(("hidden", manner) for manner in ("right", "beside", "all", "padded")),
    *(("states", manner) for manner in ("loaded", "part", "teacher", "rests", "copied", "room")),
    *(("rates", manner) for manner in ("anew", "given", "scheduled", "back", "before", "asks")),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("left")
    record(folder, PROGRAMS, [(program, bug, 0, 8, bug) for program, bug in [*WRONG, *RIGHT, ("margins", "right"), ("margins", "frozen")]])
    return folder


@pytest.mark.parametrize(("program", "bug"), list(WRONG))
def test_what_is_left_or_paired_wrongly_is_told(runs: Path, program: str, bug: str) -> None:
    mode, text = WRONG[program, bug]
    told = failed_of("stays", mode, runs / f"{program}-{bug}")
    assert told and all(one.startswith(text) for one in told)
    assert not any(failed_of("stays", other, runs / f"{program}-{bug}") for other in MODES if other != mode)


@pytest.mark.parametrize(("program", "manner"), RIGHT)
def test_who_leaves_nothing_breaks_none(runs: Path, program: str, manner: str) -> None:
    assert not any(failed_of("stays", mode, runs / f"{program}-{manner}") for mode in MODES)


def test_a_number_that_is_frozen_beside_an_output_layer_is_none_and_a_frozen_table_is_one(runs: Path) -> None:
    rule = Hypothesis.of("contain", kind="change", role="parameter", parent="<step>", attr="data", who="output")

    def failed(name: str) -> set[str]:
        found = registry()["contain"].examples(trace_of(runs / f"margins-{name}"), [rule]).frame
        assert found["passed"].any()
        return set(found.filter(~found["passed"])["_name"])

    assert failed("right") == set() and failed("frozen") == {"items"}


def _of(text: str) -> list[Wasted]:
    home: dict[str, object] = {}
    exec(compile(text, __file__, "exec"), home)  # no source of its own: nothing is said
    made = home["f"]
    assert isinstance(made, types.FunctionType)
    return wasted(made.__code__, _read(made.__code__) or set())


def test_a_function_without_a_source_says_nothing() -> None:
    assert _of("def f(x):\n    lost = g(x)\n    return x\n") == []


def test_no_variable_of_the_program_and_no_state_is_kept_alive() -> None:
    import torch

    place = Sink(Recorder(), lambda: 0, RecordConfig(run=""), lambda: True)
    told: list[str] = []
    place.number = lambda name, *args, **kwargs: told.append(name)  # type: ignore[method-assign]
    probe, states = Unread(place), Filled(place)
    net = torch.nn.Linear(3, 1)

    def trains() -> bool:
        held = net(torch.ones(1, 3))
        penalty = net(torch.ones(1, 3))  # noqa: F841  that is the mistake
        known = weakref.ref(held)
        assert held.shape == (1, 1)
        probe._called((), None)
        state = net.state_dict()
        states._taken((net,), {}, state, False)
        kept = weakref.ref(state)
        del held, state
        return known() is None and kept() is None

    assert trains() and told == ["penalty"]


def test_no_mode_of_the_program_sees_a_look() -> None:
    import torch
    from torch.overrides import TorchFunctionMode

    place = Sink(Recorder(), lambda: 0, RecordConfig(run=""), lambda: True)
    told: list[str] = []
    place.number = lambda name, *args, **kwargs: told.append(name)  # type: ignore[method-assign]
    probe, asked = Unread(place), list[str]()

    class Listens(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: object, kinds: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None) -> object:
            asked.append(str(func))
            return func(*args, **(kwargs or {}))  # type: ignore[operator]

    def trains(state: object, net: torch.nn.Module) -> None:
        one, reward, end, other = state  # type: ignore[misc]
        penalty = net(one).sum() + reward + end + other.sum()  # noqa: F841  that is the mistake
        with Listens():
            for step in range(4):
                probe.step_begins(step)
                probe._called((), None)

    state = torch.randn(8, 3)
    trains((state, 1.0, 0.0, state.clone()), torch.nn.Linear(3, 1))
    assert told == ["penalty", "other"] and asked == []



def test_what_is_looked_at_can_be_resized() -> None:
    """An array on a tensor's own memory would fix its size."""
    import torch

    place = Sink(Recorder(), lambda: 0, RecordConfig(run=""), lambda: True)
    ids, target = torch.randint(1, 9, (8, 12)), torch.randint(1, 9, (96,))
    scores = torch.randn(96, 10, requires_grad=True)
    net = torch.nn.Linear(3, 1)
    for probe in (Shown(place), Packed(place)):
        if isinstance(probe, Shown):
            probe._begins((net, ids), None)
        probe._embeds((ids,), None)
        probe._lost((scores, target), None)
    ids.resize_(16, 12)
    target.resize_(200)
    assert ids.shape == (16, 12)
