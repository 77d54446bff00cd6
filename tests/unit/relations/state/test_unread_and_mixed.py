"""Modes of `stays` on a mask that nobody reads and on dimensions that change places without their elements: `unread`, `reshaped`; and what own rules say of arguments and turns (`manner`)."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
from helpers.trained import failed_of, record

from proctor.instrument.config import RecordConfig
from proctor.instrument.probes import Sink
from proctor.instrument.probes.unread import Unread
from proctor.invariants.relations import registry
from proctor.invariants.trace import Trace
from proctor.native import Recorder

pytest.importorskip("torch")

PROGRAMS = {
    "places": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 1)
            def forward(self, x):
                hidden = self.first(x)  # 6 samples, 9 places, WIDTH
                if BUG in ("mixed", "right"):
                    hidden = hidden.reshape(6, WIDTH, 9) if BUG == "mixed" else hidden.permute(0, 2, 1)
                    return self.last(hidden.reshape(6, WIDTH, 9).mean(2))
                if BUG == "turned":
                    hidden = hidden.transpose(0, 1)
                rows = self.last(hidden.reshape(-1, WIDTH).relu())
                return rows.view(6, 9, 1).mean(1) if BUG == "joined" else rows.view(9, 6, 1).mean(0)
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        for step in range(5):
            optimizer.zero_grad()
            net(torch.randn(6, 9, 4)).square().mean().backward()
            optimizer.step()
    """,
    "masks": """
        class Reads(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(5, 1)
            def forward(self, x, mask):
                return self.layer(x * mask).squeeze(1)
        class Leaves(Reads):
            def forward(self, x, mask):
                return self.layer(x).squeeze(1)
        class Idle(Reads):
            def forward(self, _x, _mask):
                return self.layer(torch.randn(8, 5)).squeeze(1)
        net = {"argument": Leaves, "spread": Leaves, "named_so": Idle}.get(BUG, Reads)()
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        def sample():
            words = torch.randint(2, 9, (8, 5))
            mask = (torch.arange(5) < torch.arange(1, 9)[:, None]).long()
            return torch.randn(8, 5), torch.randn(8), (torch.arange(8) % 3 == 0).float(), words * mask, mask
        def labelled():
            return torch.randn(8, 5), torch.randn(8), (torch.arange(8) % 2), F.one_hot(torch.arange(8) % 2).float(), torch.ones(8)
        def train(loss):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        def right():
            x, y, ends, words, mask = sample()
            train((net(x, mask.float()) - y * (1 - ends) + words.sum(1)).square().mean())
        def left_out():
            x, y, ends, words, mask = sample()
            train((net(x, mask.float()) - y + words.sum(1)).square().mean())
        def padding():
            x, y, ends, words, mask = sample()
            train((net(x, torch.ones(8, 5)) - y * (1 - ends) + words.sum(1)).square().mean())
        def named():
            x, y, _ends, words, mask = sample()
            train((net(x, mask.float()) - y + words.sum(1)).square().mean())
        def deleted():
            x, y, ends, words, mask = sample()
            del ends
            train((net(x, mask.float()) - y + words.sum(1)).square().mean())
        def within():
            x, y, ends, words, mask = sample()
            target = lambda: y * (1 - ends)
            train((net(x, mask.float()) - target() + words.sum(1)).square().mean())
        def labels():
            x, y, kind, one_hot, all_of_them = labelled()
            train((net(x, torch.ones(8, 5)) - y).square().mean())
        def cloned():
            x, y, ends, words, mask = sample()
            train((net(x, torch.ones(8, 5)) - y).square().mean())
        def part_of(x, y, ends, words, mask):
            return (net(x, torch.ones(8, 5)) - y).square().mean()
        def starred():
            batch = sample()
            train(part_of(*batch))
        def few():
            x, y, ends = sample()[:3]
            train((net(x, torch.ones(8, 5)) - y).square().mean())
        def spread():
            x, y, ends, words, mask = sample()
            batch = {"x": x, "mask": mask.float()}
            train((net(**batch) - y * (1 - ends) + words.sum(1)).square().mean())
        update = {"spread": spread, "left_out": left_out, "padding": padding, "named": named, "deleted": deleted, "within": within, "labels": labels, "few": few, "cloned": cloned, "starred": starred}.get(BUG, right)
        for step in range(6):
            update()
    """,
    "norms": """
        net = nn.Sequential(nn.Linear(5, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1))
        def freeze():
            for module in net.modules():
                if isinstance(module, nn.BatchNorm1d):
                    module.eval()
        if BUG != "whole":
            freeze()
        if BUG == "whole":
            net.eval()
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        net.train()
        if BUG == "kept":
            freeze()
        elif BUG == "again":
            net[1].train()
        for step in range(4):
            optimizer.zero_grad()
            net(torch.randn(8, 5)).square().mean().backward()
            optimizer.step()
    """,
    "manners": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(5, 1)
            def forward(self, x, mask=None):
                hidden = x.view(4, 3, 5).permute(0, 1, 2) if BUG == "turn" else x.view(3, 4, 5).permute(1, 0, 2)
                hidden = self.layer(hidden)
                return hidden.mean() if mask is None else (hidden * mask).mean()
        net = Net()
        def act():
            with torch.no_grad():
                return net(torch.randn(12, 5))
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        for step in range(24):
            optimizer.zero_grad()
            loss = net(torch.randn(12, 5)) if BUG == "argument" else net(torch.randn(12, 5), torch.rand(4, 3, 1))
            loss.square().backward()
            optimizer.step()
            act()
    """,
}
WRONG = {
    ("places", "mixed"): ("reshaped", "loss: a reshape makes [6, 8, 9] of [6, 9, 8]: the sizes change places and the elements do not, so that they are mixed"),
    ("places", "swapped"): ("reshaped", "loss: 6 by 9 rows were joined to 54, and are taken apart as 9 by 6: the elements of one are mixed with those of others"),
    ("norms", "undone"): ("woken", "1: 1 (BatchNorm1d) trains: 1 itself was set to evaluate, and train() of the model has reached it since"),
    ("masks", "left_out"): ("unread", "ends: no line of __main__.left_out reads ends, which holds ones and zeros, both, as ends of episodes or places of padding do"),
    ("masks", "padding"): ("unread", "mask: no line of __main__.padding reads mask, which holds ones and zeros, both, as ends of episodes or places of padding do"),
    ("masks", "argument"): ("unread", "mask: no line of __main__.Leaves.forward reads mask, which holds ones and zeros, both, as ends of episodes or places of padding do"),
}
RIGHT = [
    *(("places", manner) for manner in ("right", "joined", "turned")),
    *(("norms", manner) for manner in ("kept", "whole", "again")),
    *(("masks", manner) for manner in ("right", "named", "deleted", "within", "labels", "few", "named_so", "cloned", "starred", "spread")),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unread")
    jobs = [(program, bug, 0, 8, bug) for program, bug in [*WRONG, *RIGHT]]
    manners = [("manners", "healthy", 0, 8, ""), ("manners", "other", 1, 8, ""), ("manners", "argument", 2, 8, "argument"), ("manners", "turn", 2, 8, "turn")]
    record(folder, PROGRAMS, [*jobs, *manners])
    return folder


@pytest.mark.parametrize(("program", "bug"), list(WRONG))
def test_what_is_left_unread_or_mixed_is_told(runs: Path, program: str, bug: str) -> None:
    mode, text = WRONG[program, bug]
    assert set(failed_of("stays", mode, runs / f"{program}-{bug}")) == {text}


@pytest.mark.parametrize(("program", "manner"), RIGHT)
def test_who_reads_and_turns_breaks_none(runs: Path, program: str, manner: str) -> None:
    assert not any(failed_of("stays", mode, runs / f"{program}-{manner}") for mode in ("unread", "reshaped", "woken"))


def _broken(runs: Path, name: str) -> set[str]:
    """Manners of the healthy runs that a run breaks."""
    manner = registry()["manner"]
    learned = Trace.load([runs / "manners-healthy", runs / "manners-other"])
    frame = manner.survey(learned)
    rules = manner.settle(frame)
    assert rules
    found = manner.examples(Trace.load([runs / f"manners-{name}"]), rules).frame
    return {rules[i].text("what") for i in found.filter(~found["passed"])["hyp"].unique()}


def test_an_argument_that_the_script_gives_and_dimensions_that_a_function_turns_are_manners(runs: Path) -> None:
    assert "the script > __main__.Net.forward: argument 2" in _broken(runs, "argument")
    assert any("permute(1,0,2)" in what for what in _broken(runs, "turn"))
    assert not _broken(runs, "other")


def test_no_variable_of_the_program_is_kept_alive() -> None:
    torch = pytest.importorskip("torch")
    told: list[str] = []
    place = Sink(Recorder(), lambda: 0, RecordConfig(run=""), lambda: True)
    place.number = lambda name, *args, **kwargs: told.append(name)  # type: ignore[method-assign]
    probe = Unread(place)

    def trains() -> bool:
        held = torch.ones(1000)
        known = weakref.ref(held)
        first, second, third, mask = torch.ones(3), torch.ones(3), torch.ones(3), torch.tensor([1.0, 0, 1, 0])  # noqa: F841  that is the mistake
        assert first.shape == second.shape == third.shape
        probe._called((), None)
        del held
        return known() is None

    assert trains() and told == ["mask"]
