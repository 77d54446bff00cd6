"""What the program's functions use: rules of one run, on runs with one wrong line; and that a program does not notice."""

from __future__ import annotations

import gc
import json
import os
import sys
import weakref
from pathlib import Path

import pytest
import torch
from helpers.trained import record

from proctor.instrument.config import RecordConfig
from proctor.instrument.probes import Home, Hooks, Sink
from proctor.instrument.probes.operations import LAST_STEP, STEPS, Operations
from proctor.invariants.invariant import Hypothesis
from proctor.invariants.relations import registry
from proctor.invariants.schema import MODEL_CALL
from proctor.invariants.trace import Trace
from proctor.native import Recorder

PROGRAMS = {
    "program": """
        import json
        from pathlib import Path
        class Attention(nn.Module):
            def __init__(self):
                super().__init__()
                self.qkv, self.norm = nn.Linear(WIDTH, 3 * WIDTH), nn.LayerNorm(WIDTH)
            def forward(self, x):
                q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
                scores = q @ k.transpose(1, 2)
                if BUG != "unscaled":
                    scores = scores / WIDTH ** 0.5
                return x + scores.softmax(-1) @ v
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.attention, self.out = Attention(), nn.Linear(WIDTH, 3)
            def forward(self, x):
                return self.out(self.attention(x)).mean(1)
        class Codes(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(WIDTH, 2)
                self.register_buffer("codes", torch.randn(4, 2))
            def renew(self, z):
                self.codes.lerp_(z.detach().mean(0), 0.01)
            def forward(self, x):
                z = self.layer(x)
                if BUG == "first" and self.training:
                    self.renew(z)
                near = self.codes[torch.cdist(z, self.codes).argmin(1)]
                if BUG != "first" and self.training:
                    self.renew(z)
                return z + (near - z if BUG == "through" else (near - z).detach())
        class Sampled(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(WIDTH, 2)
            def sample(self, mean):
                if self.training != (BUG == "swapped"):
                    return mean + torch.randn_like(mean)
                return mean
            def forward(self, x):
                return self.sample(self.layer(x))
        def priorities(values, wanted):
            errors = (values - wanted).detach()
            return [e + 1e-5 for e in (errors.square() if BUG == "squares" else errors.abs())]
        def train_step(model, x, y):
            optimizer.zero_grad()
            x = x + 0.1 * (torch.ones_like(x) if BUG == "noise" else torch.randn_like(x))
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.item()
        calls = {"layer_norm": 0}
        real = F.layer_norm
        def layer_norm(*args, **kwargs):
            calls["layer_norm"] += 1
            return real(*args, **kwargs)
        F.layer_norm = layer_norm
        model, codes, sampled = Net(), Codes(), Sampled()
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True), 1, enable_nested_tensor=False)
        optimizer = torch.optim.SGD([*model.parameters(), *codes.parameters(), *encoder.parameters(), *sampled.parameters()], 0.1)
        losses = []
        def evaluate(x):
            encoder.eval()
            with torch.no_grad():
                found = encoder(x).sum().item()
                sampled.eval()
                found += sampled(x[:, 0]).sum().item()
            return encoder.train() and sampled.train() and found
        for step in range(12):
            x = torch.randn(8, 4, WIDTH)
            (codes(x[:, 0]).square().mean() + sampled(x[:, 0]).square().mean()).backward()
            losses.append(train_step(model, x, torch.randint(0, 3, (8,))))
            losses += [p.item() for p in priorities(x[:, 0, 0], x[:, 1, 0])]
            losses.append(evaluate(x))
        F.layer_norm = real
        Path(OUT + ".json").write_text(json.dumps({"losses": losses, "calls": calls}))
    """,
    "loops": """
        import json
        from pathlib import Path
        class Rounded(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.floor() if BUG == "floored" else x.round()
            @staticmethod
            def backward(ctx, grad):
                return grad.neg()
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers, self.drop = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(WIDTH // 4)), nn.Dropout(0.1)
                self.label, self.domain = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 2)
            def forward(self, x):
                for layer in self.layers:
                    x = layer(x).relu()
                return self.label(self.drop(x)), self.domain(Rounded.apply(x))
        def target(values, after, done):
            wanted = values + 0.9 * (after if BUG == "endless" else after * (1 - done))
            return values.detach() - wanted if BUG == "detached" else values - wanted
        def forget(state):
            state.zero_()
        def validate(model, x):
            if BUG != "trains_on":
                model.eval()
            with torch.no_grad():
                label, _ = model(x)
            model.train()
            return label.sum().item()
        def train_epoch(model, optimizer):
            state = torch.zeros(WIDTH)
            for i in range(7):
                x = torch.randn(8, WIDTH)
                label, domain = model(x)
                kind = torch.zeros(8) if BUG == "one_kind" else torch.ones(8)
                loss = F.cross_entropy(label, torch.randint(0, 3, (8,))) + F.cross_entropy(domain, kind.long()) + target(label[:, 0], label[:, 1], kind).square().mean()
                if BUG == "twice":
                    loss = loss + F.cross_entropy(label, torch.randint(0, 3, (8,)))
                optimizer.zero_grad()
                loss.backward()
                if BUG == "late":
                    optimizer.step()
                for p in model.domain.parameters():
                    p.grad.data *= 0.5
                if BUG != "late":
                    optimizer.step()
                if BUG != "remembers":
                    forget(state)
                losses.append(loss.item())
        losses = []
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for epoch in range(12):
            train_epoch(model, optimizer)
            losses.append(validate(model, torch.randn(8, WIDTH)))
        Path(OUT + ".json").write_text(json.dumps({"losses": losses, "calls": {}}))
    """,
}
WRONG = {
    "unscaled": "Attention.forward it does not use div", "through": "Codes.forward it does not use detach", "squares": "priorities it does not use abs",
    "noise": "train_step it does not use randn_like", "first": "Codes.forward renew() comes before",
    "swapped": "Sampled.sample while it is evaluated, it uses randn_like, add, too",
}  # fmt: skip
LOOPS = {
    "floored": "Rounded.forward it does not use round", "endless": "target it does not use mul (place 2)", "detached": "target it uses detach, too",
    "trains_on": "validate it does not use Net in evaluation mode", "one_kind": "train_epoch it does not use ones",
    "twice": "train_epoch it uses randint (place 2), cross_entropy (place 3), add (place 3), too", "late": "train_epoch step of optimizer 1 comes before mul", "remembers": "train_epoch it does not call forget()",
}  # fmt: skip
RELATION = registry()["manner"]
MODES = ("uses", "then", "only")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("operations")
    wrong = [*(("program", bug, 0, 8, bug) for bug in WRONG), *(("loops", bug, 0, 8, bug) for bug in LOOPS)]
    record(folder, PROGRAMS, [*wrong, *((program, *how) for program in PROGRAMS for how in (("own", 1, 12, ""), ("right", 0, 8, "")))])
    return folder


def rules(runs: Path, program: str = "program") -> list[Hypothesis]:
    return [h for h in RELATION.propose(Trace.load([runs / f"{program}-own"])) if h.text("mode") in MODES]


def failed(run: Path, known: list[Hypothesis]) -> list[str]:
    trace = Trace.load([run])
    frame = RELATION.examples(trace, known).frame
    assert frame.height
    rows = [(known[row["hyp"]], row) for row in frame.filter(~frame["passed"]).to_dicts()]
    return [f"{d.function} {d.seen}" for h, row in rows for d in (RELATION.detail(trace, h, row),)]


@pytest.mark.parametrize("bug", list(WRONG))
def test_one_operation_that_is_left_out_or_misplaced_is_named(runs: Path, bug: str) -> None:
    said = failed(runs / f"program-{bug}", rules(runs))
    assert any(WRONG[bug] in text for text in said), said


@pytest.mark.parametrize("bug", list(LOOPS))
def test_one_line_of_a_loop_is_named(runs: Path, bug: str) -> None:
    said = failed(runs / f"loops-{bug}", rules(runs, "loops"))
    assert any(LOOPS[bug] in text for text in said), said


@pytest.mark.parametrize("program", list(PROGRAMS))
def test_another_seed_size_and_depth_use_the_same(runs: Path, program: str) -> None:
    assert failed(runs / f"{program}-right", rules(runs, program)) == []


@pytest.mark.parametrize("program", list(PROGRAMS))
def test_the_program_computes_what_it_computes_alone(runs: Path, program: str) -> None:
    text, out = (runs / f"{program}.py").read_text(), runs / f"{program}-bare"
    exec(compile(text, str(runs / f"{program}.py"), "exec"), {"__name__": "__main__", "SEED": 0, "WIDTH": 8, "BUG": "", "OUT": str(out)})
    assert json.loads((runs / f"{program}-bare.json").read_text()) == json.loads((runs / f"{program}-right.json").read_text())


def test_nothing_runs_twice(runs: Path) -> None:
    trace = Trace.load([runs / "program-right"])
    made = {name: (trace.calls["fn"] == code).sum() for code, name in enumerate(trace.functions) if name}
    assert made["torch.Tensor.backward"] == 24 and made["torch.nn.functional.cross_entropy"] == 12


def test_what_an_optimizer_computes_is_not_the_programs(runs: Path) -> None:
    used = [h.text("what") for h in rules(runs) if h.text("what").startswith("__main__.train_step: ")]
    assert used and not any(word in " ".join(used) for word in ("add_", "_foreach", "sub_"))


@pytest.fixture(autouse=True)
def nothing_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is not None:
        monkeypatch.setattr(dynamo, "cached_backends", {1: None})


def probe() -> Operations:
    return Operations(Sink(Recorder(), lambda: 0, RecordConfig(run="run"), lambda: True))


def stack() -> int:
    return len(torch.overrides._get_current_function_mode_stack())


def test_the_mode_is_off_behind_each_call_and_an_error_of_ours_stays_in_the_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = probe()
    before, after = watch.hooks("program.loss", Home.USER)
    assert before is not None and after is not None
    for call in range(3):
        before((), None)
        assert stack() == (call > 0)
        torch.ones(2).tanh()
        after((), None, None, call == 2)
        assert stack() == 0
    before((), None)
    monkeypatch.setattr("proctor.instrument.probes._looks._plain", lambda name: 1 / 0)
    assert torch.ones(2).tanh().numel() == 2
    with pytest.raises(ZeroDivisionError):
        after((), None, None, False)
    assert stack() == 0


def test_a_mode_that_the_program_leaves_above_ours_is_not_taken_off() -> None:
    watch = probe()
    before, after = watch.hooks("program.setup", Home.USER)
    assert before is not None and after is not None
    before((), None)
    after((), None, None, False)
    before((), None)
    theirs = torch.device("cpu")
    with theirs:
        after((), None, None, False)
        assert stack() == 2
        assert float(torch.ones(2).sum()) == 2
    before((), None)  # the next one takes off what was left
    assert stack() == 1
    after((), None, None, False)
    assert stack() == 0


def test_nothing_is_looked_at_where_attention_may_take_kernels_of_inference_or_something_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = probe()
    begins, ends = watch.hooks(MODEL_CALL, Home.TORCH)
    before, after = watch.hooks("program.evaluate", Home.USER)
    assert begins is not None and ends is not None and before is not None and after is not None
    model = torch.nn.TransformerEncoderLayer(4, 1, 4).eval()
    before((), None)
    after((), None, None, False)
    before((), None)
    assert stack() == 1
    begins((model,), None)
    assert stack() == 0
    ends((model,), None, None, False)
    after((), None, None, False)
    assert stack() == 0
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        pytest.skip("this torch has not loaded its compiler")
    monkeypatch.setattr(dynamo, "cached_backends", {1: object()})
    before((), None)
    assert stack() == 0
    after((), None, None, False)


def test_calls_with_several_updates_are_looked_at_up_to_the_first_and_late_ones_are_not() -> None:
    watch = probe()
    before, after = watch.hooks("program.epoch", Home.USER)
    updates, _ = watch.hooks("torch.optim.Optimizer.step", Home.TORCH)
    assert before is not None and after is not None and updates is not None
    optimizer, looks = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]), []
    before((), None)
    for _ in range(3):
        updates((optimizer,), None)
    after((), None, None, False)
    for _ in range(8):
        before((), None)
        looks.append(stack())
        updates((optimizer,), None)
        assert stack() == 0
        after((), None, None, False)
    assert looks == [1] * 6 + [0] * 2
    watch.step_begins(LAST_STEP + 1)
    before((), None)
    assert stack() == 0


def test_a_look_ends_where_steps_begin_to_be_left_out() -> None:
    watch = probe()
    before, after = watch.hooks("program.train_step", Home.USER)
    assert before is not None and after is not None
    before((), None)
    after((), None, None, False)
    before((), None)
    assert stack() == 1
    watch.thinned()
    assert stack() == 0
    before((), None)
    assert stack() == 0


def test_a_step_is_looked_at_where_no_mode_is_on_and_a_forked_child_computes_without_ours() -> None:
    watch = probe()
    with torch.device("cpu"):  # it would take our mode off at its end, and stay on itself
        watch.step_begins(STEPS[0])
        assert stack() == 1
    watch.step_begins(STEPS[0] + 1)
    assert stack() == 0
    watch.step_begins(STEPS[1])
    assert stack() == 1
    child = os.fork()
    if child == 0:
        os._exit(stack())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert stack() == 1
    watch.step_begins(STEPS[1] + 1)
    assert stack() == 0


def test_what_is_called_seldom_is_looked_at_late_and_what_is_called_often_is_not() -> None:
    watch = probe()
    seldom, often = (watch.hooks(f"program.{name}", Home.USER) for name in ("evaluate", "loss"))

    def call(hooks: Hooks) -> int:
        before, after = hooks
        assert before is not None and after is not None
        before((), None)
        on = stack()
        after((), None, None, False)
        return on

    assert [call(often) for _ in range(9)] == [0, *[1] * 6, 0, 0]
    assert call(seldom) == 0
    watch.step_begins(LAST_STEP + 1)
    assert call(seldom) == 1 and call(often) == 0


def test_no_look_keeps_what_its_caller_holds() -> None:
    watch = probe()
    before, after = watch.hooks("program.loss", Home.USER)

    def caller() -> weakref.ref[torch.Tensor]:
        assert before is not None and after is not None
        held = torch.ones(2)
        for _ in range(3):
            before((), None)
            held.tanh()
            after((), None, None, False)
        return weakref.ref(held)

    gc.disable()
    try:
        assert caller()() is None
    finally:
        gc.enable()
