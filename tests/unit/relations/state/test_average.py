"""`average`: copies of a model, recorded while a small model trains, move as averages of it or do not."""

from __future__ import annotations

import copy
import gc
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.runs import write_run

pytest.importorskip("torch")
import torch

from proctor.instrument.config import RecordConfig
from proctor.instrument.probes import Home, Sink
from proctor.instrument.probes.averages import Averages
from proctor.invariants.invariant import Hypothesis, Standing
from proctor.invariants.relations.average import Average
from proctor.invariants.schema import MODEL_CALL, Name
from proctor.invariants.trace import Trace
from proctor.native import Recorder

RELATION = Average()
STEPS = 12
_numbers = itertools.count()
Act = Callable[[Any, int], None]  # given the model and the step


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh()), torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


def recorded(path: Path, make: Callable[[Any], tuple[Any, Act]], *, before: bool = False, rate: float = 0.5, build: Callable[[], Any] = Net, **info: Any) -> Trace:
    """Train a net; an act, made with what it keeps, runs after each update or before it."""
    sink = Sink(Recorder(), lambda: 0, RecordConfig(run=str(path)), lambda: True)
    probe = Averages(sink)
    gc.freeze()  # what the test runner holds is not looked through
    called, _ = probe.hooks(MODEL_CALL, Home.TORCH)
    updates, _ = probe.hooks("torch.optim.Optimizer.step", Home.TORCH)
    assert called is not None
    assert updates is not None
    torch.manual_seed(0)
    net = build()
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    kept, act = make(net)
    values: list[dict[str, Any]] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        called((net,), None)
        (net(torch.randn(16, 6)) - 1).square().mean().backward()
        if before:
            act(net, step)
        updates((optimizer,), None)
        optimizer.step()
        if not before:
            act(net, step)
        state = torch.get_rng_state()
        probe.step_begins(step + 1)
        assert torch.equal(state, torch.get_rng_state())
        values += [{"row": row, "step": step} for row in sink.take_rows()]
    del kept
    gc.unfreeze()
    texts = {(kind, code): text for kind, code, text in sink.recorder.drain_names()}
    rows = [
        {
            "kind": "average", "step": v["step"], "place": texts[int(Name.PLACE), r[3]], "meta": json.loads(texts[int(Name.META), r[5]]),
            "norm": r[7], "number": r[8],
        }
        for v in values for r in (v["row"],)
    ]  # fmt: skip
    weight = {"var": {"model": "__main__.Net", "module": "torch.nn.Linear", "name": "head.weight"}, "fp": 3}
    folder = write_run(path / f"run{next(_numbers)}", [{"values": rows, "states": [weight], **info}])
    return Trace.load([folder])


def module(decay: float = 0.9, parts: Callable[[str], bool] = lambda name: True) -> Callable[[Any], tuple[Any, Act]]:
    """A deep copy that is averaged, all of it or some of its parameters."""

    def make(net: Any) -> tuple[Any, Act]:
        ema = copy.deepcopy(net)

        def act(net: Any, step: int) -> None:
            with torch.no_grad():
                for (name, a), p in zip(ema.named_parameters(), net.parameters()):
                    if parts(name):
                        a.mul_(decay).add_(p, alpha=1 - decay)

        return ema, act

    return make


def shadow(net: Any) -> tuple[Any, Act]:
    """Averages in a dict by name."""
    held = {name: p.detach().clone() for name, p in net.named_parameters()}

    def act(net: Any, step: int) -> None:
        for name, p in net.named_parameters():
            held[name].lerp_(p.detach(), 0.05)

    return held, act


def running(net: Any) -> tuple[Any, Act]:
    averaged = torch.optim.swa_utils.AveragedModel(net)
    return averaged, lambda net, step: averaged.update_parameters(net)


def modes(run: Trace) -> set[str]:
    """Habits that a run keeps."""
    kept = {h.text("mode") for h in RELATION.propose(run)}
    for h in RELATION.propose(run):
        frame = RELATION.examples(run, [h]).frame
        if not frame["passed"].fill_null(value=True).all():
            kept.discard(h.text("mode"))
    return kept


def test_what_an_average_does_is_learned_wherever_it_is_kept(tmp_path: Path) -> None:
    assert modes(recorded(tmp_path, module())) == {"after", "steady", "moves", "between", "away", "keeps", "starts"}
    assert modes(recorded(tmp_path, shadow)) == {"after", "steady", "moves", "between", "away", "keeps", "starts"}
    assert "after" in modes(recorded(tmp_path, running))
    assert "steady" not in modes(recorded(tmp_path, running)), "a running mean moves ever less"


def rules_of(run: Trace) -> dict[str, Hypothesis]:
    return {h.text("mode"): h for h in RELATION.propose(run)}


def broken(healthy: Trace, run: Trace) -> set[str]:
    """Modes of the healthy run's rules that another run breaks."""
    found = set()
    for mode, rule in rules_of(healthy).items():
        frame = RELATION.examples(run, [rule]).frame
        if not frame["passed"].fill_null(value=True).all():
            found.add(mode)
    return found


def test_an_average_that_is_taken_before_the_update_is_told(tmp_path: Path) -> None:
    healthy = recorded(tmp_path, module())
    run = recorded(tmp_path, module(), before=True)
    assert broken(healthy, run) == {"after"}
    rule = rules_of(healthy)["after"]
    row = RELATION.examples(run, [rule]).frame.filter(~RELATION.examples(run, [rule]).frame["passed"]).row(0, named=True)
    assert "it fits the model before the update" in RELATION.detail(run, rule, row).seen


def test_an_average_that_misses_tensors_or_changes_its_rate_is_told(tmp_path: Path) -> None:
    healthy = recorded(tmp_path, module())
    assert "after" in broken(healthy, recorded(tmp_path, module(parts=lambda name: name.startswith("body"))))

    def drifting(net: Any) -> tuple[Any, Act]:
        ema = copy.deepcopy(net)

        def act(net: Any, step: int) -> None:
            with torch.no_grad():
                for a, p in zip(ema.parameters(), net.parameters()):
                    a.lerp_(p, 0.1 * 0.8**step)

        return ema, act

    assert broken(healthy, recorded(tmp_path, drifting)) == {"steady"}


def test_an_average_that_is_pushed_away_from_the_model_is_told_by_any_program(tmp_path: Path) -> None:
    def pushed(net: Any) -> tuple[Any, Act]:
        shadow = [p.detach().clone() for p in net.parameters()]

        def act(net: Any, step: int) -> None:
            for s, p in zip(shadow, net.parameters()):
                s.add_((s - p.detach()) * 0.1)

        return shadow, act

    rule = Hypothesis.of("average", mode="away", what="copy")
    healthy, run = (RELATION.examples(recorded(tmp_path, make), [rule]).frame for make in (shadow, pushed))
    assert healthy.height and healthy["passed"].all()
    assert run.height and not run["passed"].any()
    assert RELATION.standing_of(rule) is Standing.CHOICE


def test_an_average_whose_weights_are_swapped_is_told_by_any_program(tmp_path: Path) -> None:
    def warming(net: Any) -> tuple[Any, Act]:
        ema = copy.deepcopy(net)

        def act(net: Any, step: int) -> None:
            with torch.no_grad():
                for a, p in zip(ema.parameters(), net.parameters()):
                    a.lerp_(p, 1 - min(0.99, (1 + step) / (10 + step)))

        return ema, act

    def copied(net: Any) -> tuple[Any, Act]:
        kept = copy.deepcopy(net)
        return kept, lambda net, step: kept.load_state_dict(net.state_dict())

    rule = Hypothesis.of("average", mode="keeps", what="copy")
    for healthy in (module(), module(0.2), warming, copied, shadow, running):
        frame = RELATION.examples(recorded(tmp_path, healthy), [rule]).frame
        assert frame.height and frame["passed"].all()
    for decay in (0.01, 0.05):
        run = recorded(tmp_path, module(decay))
        frame = RELATION.examples(run, [rule]).frame
        bad = frame.filter(~frame["passed"])
        assert bad.height > 3
        assert RELATION.detail(run, rule, bad.row(0, named=True)).seen == f"it goes {1 - decay} of the way to the model, 3 moves in a row"
    assert RELATION.standing_of(rule) is Standing.CHOICE


def test_an_average_that_did_not_begin_as_a_copy_is_told(tmp_path: Path) -> None:
    def averaged(ema: Any, decay: float = 0.99, begins: int = 0) -> tuple[Any, Act]:
        def act(net: Any, step: int) -> None:
            with torch.no_grad():
                for a, p in zip(ema.parameters(), net.parameters()):
                    a.lerp_(p, 1 - decay) if step >= begins else None

        return ema, act

    def warming(net: Any) -> tuple[Any, Act]:
        ema = Net()  # its own weights count 1/2, 1/6, 1/24 … of the average

        def act(net: Any, step: int) -> None:
            with torch.no_grad():
                for a, p in zip(ema.parameters(), net.parameters()):
                    a.lerp_(p, max(1 / (step + 2), 0.08))

        return ema, act

    def grown(net: Any) -> tuple[Any, Act]:
        held = [torch.zeros_like(p) for p in net.parameters()]  # whoever reads it divides by 1 - decay ** steps

        def act(net: Any, step: int) -> None:
            for s, p in zip(held, net.parameters()):
                s.lerp_(p.detach(), 0.05)

        return held, act

    def copied_first(net: Any) -> tuple[Any, Act]:
        ema = Net()
        steps = averaged(ema)[1]
        return ema, lambda net, step: steps(net, step) if step else ema.load_state_dict(net.state_dict())

    rule = Hypothesis.of("average", mode="starts", what="copy")
    for healthy in (module(0.95), shadow, warming, grown, copied_first, lambda net: averaged(copy.deepcopy(net), begins=6)):
        frame = RELATION.examples(recorded(tmp_path, healthy, rate=0.01), [rule]).frame
        assert frame.height == 3 and frame["passed"].all()
    assert RELATION.examples(recorded(tmp_path, module(0.6), rate=0.01), [rule]).frame.is_empty()
    for before in (False, True):  # the average may be taken in the forward
        run = recorded(tmp_path, lambda net: averaged(Net()), rate=0.01, before=before)
        frame = RELATION.examples(run, [rule]).frame
        assert frame["passed"].to_list() == [False] * 3
    assert "4 of 4 tensors that were looked at were far from the model's" in RELATION.detail(run, rule, frame.row(0, named=True)).seen
    for fast in (module(0.95), lambda net: averaged(Net())):  # where training goes as far in some steps, nothing can be said against it
        assert RELATION.examples(recorded(tmp_path, fast, rate=2.0), [rule]).frame["passed"].all()
    assert RELATION.standing_of(rule) is Standing.CHOICE


def test_an_average_of_another_model_or_none_is_told(tmp_path: Path) -> None:
    healthy = recorded(tmp_path, module())

    def stale(net: Any) -> tuple[Any, Act]:
        ema, source = copy.deepcopy(net), copy.deepcopy(net)
        with torch.no_grad():
            source.head.weight.add_(torch.randn(3, 8))

        def act(net: Any, step: int) -> None:
            with torch.no_grad():
                for a, p in zip(ema.parameters(), (net if step < 5 else source).parameters()):
                    a.lerp_(p, 0.1)

        return (ema, source), act

    assert {"after", "between"} <= broken(healthy, recorded(tmp_path, stale))
    forgotten = recorded(tmp_path, lambda net: (copy.deepcopy(net), lambda net, step: None))
    assert broken(healthy, forgotten) == {"moves"}


def test_a_target_that_is_copied_now_and_then_is_no_average(tmp_path: Path) -> None:
    def target(net: Any) -> tuple[Any, Act]:
        kept = copy.deepcopy(net)
        return kept, lambda net, step: kept.load_state_dict(net.state_dict()) if step % 4 == 3 else None

    assert not {"moves", "between"} & modes(recorded(tmp_path, target))


def test_a_model_that_an_optimizer_trains_is_no_copy_and_what_is_gone_ends(tmp_path: Path) -> None:
    def twin(net: Any) -> tuple[Any, Act]:
        other = copy.deepcopy(net)
        return other, lambda net, step: None

    assert recorded(tmp_path, lambda net: (None, lambda net, step: None)).values.is_empty()
    assert not recorded(tmp_path, twin).values.is_empty()


def test_records_that_are_missing_break_nothing(tmp_path: Path) -> None:
    healthy = recorded(tmp_path, module())
    thinned = recorded(tmp_path, module(), dropped=5)
    thinned.values = thinned.values.filter(thinned.values["ctx"] % 3 != 0)
    assert broken(healthy, thinned) == set()


class Pair(torch.nn.Module):
    """A model that holds its own average, as a momentum encoder is."""

    def __init__(self, copied: bool) -> None:
        super().__init__()
        self.query, self.key = (torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)) for _ in range(2))
        self.key.requires_grad_(requires_grad=False)
        if copied:
            self.key.load_state_dict(self.query.state_dict())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for k, q in zip(self.key.parameters(), self.query.parameters()):
                k.lerp_(q, 0.01)
        return self.query(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("copied", [True, False])
def test_an_average_within_the_model_is_found(tmp_path: Path, copied: bool) -> None:
    run = recorded(tmp_path, lambda net: (None, lambda net, step: None), rate=0.01, build=lambda: Pair(copied))
    assert "before" in modes(run)
    assert RELATION.examples(run, [Hypothesis.of("average", mode="starts", what="copy")]).frame["passed"].to_list() == [copied] * 3
