"""Which forwards in evaluation mode train their model: those that an update of it applies, wherever the program calls it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import polars as pl
import pytest
from helpers.trained import failed_of, record

from proctor.invariants.invariant import Hypothesis
from proctor.invariants.relations import registry
from proctor.invariants.schema import CallFlag
from proctor.invariants.trace import Trace

PROGRAMS = {
    # A discriminator that evaluates while the generator trains, and the other way round.
    "gan": """
        class G(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = nn.Sequential(nn.Linear(8, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8))
            def forward(self, x):
                return self.net(x)
        class D(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = nn.Sequential(nn.Linear(8, WIDTH), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(WIDTH, 1))
            def forward(self, x):
                return self.net(x)
        g, d = G(), D()
        optimizers = [torch.optim.Adam(m.parameters(), lr=1e-3) for m in (g, d)]
        for step in range(16):
            if BUG == "alternates":
                g.eval(), d.train()
            optimizers[1].zero_grad()
            fake = g(torch.randn(16, 8))
            (F.softplus(-d(torch.randn(16, 8) + 1)).mean() + F.softplus(d(fake.detach())).mean()).backward()
            optimizers[1].step()
            if BUG == "alternates":
                g.train(), d.eval()
            for part in range(2 if BUG == "adds up" else 1):
                F.softplus(-d(g(torch.randn(16, 8)))).mean().backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
            if step == 7 and BUG in ("samples", "adds up"):
                g.eval()
                with torch.no_grad():
                    g(torch.randn(4, 8))
            if step == 7 and BUG == "samples twice":
                g.eval()
                g(torch.randn(4, 8))
                g.train()
    """,
    # A classifier that evaluates while it is attacked, or as a whole behind a loop that trains it by its parts.
    "classifier": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.head = nn.Sequential(nn.Sequential(nn.Linear(8, WIDTH), nn.Dropout(0.1))), nn.Linear(WIDTH, 3)
            def forward(self, x):
                return self.head(self.body(x))
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        whole = torch.compile(model, backend="eager") if "compiled" in BUG else model
        for epoch in range(3):
            if "forgets" not in BUG or epoch == 0:
                whole.train()
            for step in range(6):
                x, y = torch.randn(8, 8), torch.randint(3, (8,))
                if BUG == "attacks":
                    model.eval()
                    x.requires_grad_()
                    F.cross_entropy(model(x), y).backward()
                    x = (x + 0.1 * x.grad.sign()).detach()
                    model.train()
                optimizer.zero_grad()
                out = model.head(model.body(x)) if BUG == "parts" else whole(x)
                F.cross_entropy(out, y).backward()
                optimizer.step()
            whole.eval()
            F.cross_entropy(whole(torch.randn(8, 8)), torch.randint(3, (8,)))
        x = torch.randn(8, 8, requires_grad=True)
        F.cross_entropy(model(x), torch.randint(3, (8,))).backward()  # saliency, behind the training
    """,
    # By hand, without an optimizer: a backward stands for the update.
    "by_hand": """
        model = nn.Sequential(nn.Linear(8, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, 1))
        teacher = nn.Sequential(nn.Linear(8, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, 1)).eval()
        for step in range(8):
            if BUG == "forgets" and step == 4:
                model.eval()
            x = torch.randn(8, 8)
            (model(x) - teacher(x).detach()).square().mean().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
                    p.grad = None
    """,
    # A picture that is trained through a network, which is not.
    "picture": """
        net, picture = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval(), torch.rand(1, 3, 8, 8, requires_grad=True)
        net.requires_grad_(False)
        optimizer = torch.optim.Adam([picture], 0.01)
        for step in range(8):
            optimizer.zero_grad()
            net(picture).square().mean().backward()
            optimizer.step()
    """,
    # Parts are called, and the model that has them never is.
    "parts": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.head = nn.Sequential(nn.Sequential(nn.Linear(8, WIDTH), nn.Dropout(0.1))), nn.Linear(WIDTH, 3)
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
        for step in range(8):
            if step == 4 and BUG == "forgets":
                net.eval()
            optimizer.zero_grad()
            net.head(net.body(torch.randn(8, 8))).square().mean().backward()
            optimizer.step()
    """,
}
HEALTHY = [("gan", "right"), ("gan", "alternates"), ("gan", "samples twice"), ("classifier", "right"), ("classifier", "attacks"), ("classifier", "parts"), ("classifier", "compiled"), ("by_hand", "right"), ("picture", "right"), ("parts", "right")]
TRAINING = {("gan", "samples"): (), ("gan", "adds up"): (), ("classifier", "forgets"): ("Net",), ("classifier", "compiled, forgets"): ("Net",), ("by_hand", "forgets"): ("Sequential",), ("parts", "forgets"): ("Linear",)}  # and whose last forward evaluates
RESUMES = {("gan", "samples"): "G", ("gan", "adds up"): "G", ("classifier", "forgets"): "Net", ("classifier", "compiled, forgets"): "Net"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("modes")
    record(folder, PROGRAMS, [(program, how, 0, 24, how) for program, how in (*HEALTHY, *TRAINING)])
    return folder


def last_forwards(run: Path, outermost: bool = False) -> set[str]:
    """Classes whose last forward before a backward is told to evaluate.

    Args:
        outermost: in a trace that has no calls of modules in modules, as `watch` makes it.
    """
    relation, trace = registry()["argument"], Trace.load([run])
    if outermost:
        forwards = [code for code, name in enumerate(trace.functions) if name and name.endswith(".forward")]
        inner = pl.col("fn").is_in(forwards) & (pl.col("flags") & int(CallFlag.ROOT) == 0)
        trace = dataclasses.replace(trace, calls=trace.calls.filter(~inner))
    rules = [rule for rule in relation.propose(trace) if rule["mode"] == "training"] or [Hypothesis.of("argument", mode="training", fn="<model>.forward", feature="0.training")]
    frame = relation.examples(trace, rules).frame
    return {str(row["class"]).rpartition(".")[2] for row in frame.filter(~frame["passed"].fill_null(value=True)).to_dicts()}


@pytest.mark.parametrize(("program", "how"), HEALTHY)
def test_a_forward_that_no_update_of_the_model_applies_may_evaluate(runs: Path, program: str, how: str) -> None:
    run = runs / f"{program}-{how}"
    assert program == "by_hand" or failed_of("course", "resumes", run) == []  # which speaks of updates
    assert last_forwards(run) == set()
    assert last_forwards(run, outermost=True) == set()


@pytest.mark.parametrize(("program", "how"), RESUMES)
def test_a_model_that_goes_on_in_evaluation_mode_is_named(runs: Path, program: str, how: str) -> None:
    found = failed_of("course", "resumes", runs / f"{program}-{how}")
    assert found
    assert {text.partition(":")[0].rpartition(".")[2] for text in found} == {RESUMES[program, how]}


@pytest.mark.parametrize(("program", "how"), TRAINING)
def test_the_last_forward_before_a_backward_is_told(runs: Path, program: str, how: str) -> None:
    assert last_forwards(runs / f"{program}-{how}") == set(TRAINING[program, how])
