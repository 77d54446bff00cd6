"""Rules on parameters and buffers where a program thaws a part of its model in the middle of a run, freezes all for an evaluation, or trains one model behind another."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from helpers.trained import record

pytest.importorskip("torch")

from proctor.infer.engine import infer
from proctor.invariants.invariant import Hypothesis
from proctor.invariants.relations import registry
from proctor.invariants.trace import Trace

PROGRAMS = {
    "thaws": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.backbone = nn.Sequential(nn.Conv2d(1, WIDTH, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
                self.head = nn.Linear(WIDTH, 3)
            def forward(self, x):
                return self.head(self.backbone(x))
        model = Net()
        model.backbone.requires_grad_(BUG == "whole")
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=4e-3)
        for step in range(12):
            if step == 6 and BUG != "whole":
                model.backbone.requires_grad_(True)
                optimizer.add_param_group({"params": list(model.backbone.parameters())})
            x = torch.randn(16, 1, 8, 8)
            loss = F.cross_entropy(model(x), x.mean((1, 2, 3)).gt(0).long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """,
    "evaluated": """
        import io
        model = nn.Sequential(nn.Linear(6, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for step in range(12):
            for p in model.parameters():
                p.requires_grad = not (BUG == "momentum" and step > 6)
            x = torch.randn(16, 6)
            optimizer.zero_grad(set_to_none=BUG != "momentum")
            loss = F.mse_loss(model(x.requires_grad_()), x[:, :1].detach())
            loss.backward()
            optimizer.step()
            if step % 3 == 2:
                for p in model.parameters():
                    p.requires_grad = False
                model(x.detach())
                torch.save(model.state_dict(), io.BytesIO())
    """,
    "given_later": """
        body, head = nn.Linear(6, 64), nn.Linear(64, 1)
        with torch.no_grad():
            head.weight.mul_(0.01)
        body.requires_grad_(False)
        optimizer = torch.optim.SGD(head.parameters(), 0.01)
        for step in range(14):
            if step == 8 and BUG != "never":
                body.requires_grad_(True)
                optimizer.add_param_group({"params": body.parameters()})
            optimizer.zero_grad()
            head(body(torch.randn(16, 6)).relu()).square().mean().backward()
            optimizer.step()
            if BUG == "jumps" and step == 11:
                with torch.no_grad():
                    body.weight.mul_(50)
    """,
    "measures": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 1)
            def forward(self, x):
                hidden = self.first(x).relu()
                return self.second(hidden.detach() if BUG == "detached" and step in (5, 6) else hidden)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(9):
            optimizer.zero_grad()
            loss = model(torch.randn(16, 6)).square().mean()
            if step < 7:
                loss.backward()
            optimizer.step()
    """,
    "two": """
        class Encoder(nn.Sequential): pass
        class Decoder(nn.Sequential): pass
        class Teacher(nn.Sequential): pass
        encoder, decoder, teacher = (kind(nn.Linear(6, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 6)) for kind in (Encoder, Decoder, Teacher))
        held = [encoder] if BUG == "left_out" else [encoder, decoder]
        optimizer = torch.optim.SGD([p for m in held for p in m.parameters()], 0.01)
        for step in range(8):
            x = torch.randn(16, 6)
            loss = (decoder(encoder(x).relu()) - teacher(x)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """,
    "behind": """
        class Encoder(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv, self.bn = nn.Conv2d(1, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH)
            def forward(self, x):
                return self.bn(self.conv(x)).relu()
        class Autoencoder(Encoder):
            def __init__(self):
                super().__init__()
                self.back = nn.Conv2d(WIDTH, 1, 1)
            def forward(self, x):
                return self.back(super().forward(x))
        first, second = Autoencoder(), Encoder()
        for model in (first, second):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for step in range(6):
                optimizer.zero_grad()
                model(torch.randn(8, 1, 6, 6)).square().mean().backward()
                optimizer.step()
    """,
}


def failing(run: Path, relation: str, **what: str) -> tuple[int, list[str]]:
    """Examples of a rule that hold, and what is seen in those that do not."""
    rule = Hypothesis.of(relation, **what)
    frame = registry()[relation].examples(Trace.load([run]), [rule]).frame
    return frame.filter(frame["passed"]).height, [str(row) for row in frame.filter(~frame["passed"]).to_dicts()]


def test_what_is_frozen_for_an_evaluation_may_train_in_the_next_update(tmp_path: Path) -> None:
    record(tmp_path, PROGRAMS, [("evaluated", name or "right", 0, 8, name) for name in ("", "momentum")])
    assert failing(tmp_path / "evaluated-right", "progress", mode="frozen")[1] == []
    assert failing(tmp_path / "evaluated-momentum", "progress", mode="frozen")[1] != []


def test_weights_that_an_optimizer_is_given_later_are_no_growth_of_its_weights(tmp_path: Path) -> None:
    record(tmp_path, PROGRAMS, [("given_later", name or "right", 0, 8, name) for name in ("", "jumps")])
    assert failing(tmp_path / "given_later-right", "numeric", what="growth", bound="1")[1] == []
    assert failing(tmp_path / "given_later-jumps", "numeric", what="growth", bound="1")[1] != []


def test_a_step_without_any_gradient_says_nothing_of_the_first_layer(tmp_path: Path) -> None:
    record(tmp_path, PROGRAMS, [("measures", name or "right", 0, 8, name) for name in ("", "detached")])
    rule = {"kind": "change", "parent": "<step>", "attr": "grad", "role": "parameter", "who": "input"}
    assert failing(tmp_path / "measures-right", "contain", **rule)[1] == []
    assert failing(tmp_path / "measures-detached", "contain", **rule)[1] != []


def test_a_model_that_no_optimizer_is_given_is_named(tmp_path: Path) -> None:
    record(tmp_path, PROGRAMS, [("two", "right", 0, 8, ""), ("two", "other", 1, 12, ""), ("two", "left_out", 0, 8, "left_out")])
    progress = registry()["progress"]
    right, other, wrong = (Trace.load([tmp_path / f"two-{name}"]) for name in ("right", "other", "left_out"))
    rules = [h for h in progress.propose(right) if h["mode"] == "learns"]
    assert sorted(h.text("what").rpartition(".")[2] for h in rules) == ["Decoder", "Encoder"]
    learned = {r.hypothesis for r in infer(right, [progress])[0]}
    assert learned.issuperset(rules), "one run teaches them"
    assert progress.examples(other, rules).frame["passed"].all() and progress.examples(other, rules).frame.height == 8
    failed = progress.examples(wrong, rules).frame.filter(~pl.col("passed"))
    (rule,) = {rules[row] for row in failed["hyp"]}
    assert failed.height == 4 and rule.text("what").endswith("Decoder") and "has moved by the end of the third step" in progress.say(rule)
    assert progress.detail(wrong, rule, failed.row(0, named=True)).seen == "none of its parameters, such as 0.weight, has moved by the end of step 2"


def test_a_model_that_rests_is_not_taken_for_one_that_has_a_part_of_the_same_name(tmp_path: Path) -> None:
    record(tmp_path, PROGRAMS, [("behind", "right", 0, 8, "")])
    for kind in ("running_mean", "num_batches_tracked"):
        assert failing(tmp_path / "behind-right", "fresh", mode="moves", what=f"torch.nn.BatchNorm2d.{kind}")[1] == []


def test_a_parameter_needs_no_gradient_in_the_last_step_before_it_is_thawed(tmp_path: Path) -> None:
    record(tmp_path, PROGRAMS, [("thaws", "whole", 0, 8, "whole"), ("thaws", "right", 0, 8, "")])
    contain = registry()["contain"]
    whole, thawed = (Trace.load([tmp_path / f"thaws-{name}"]) for name in ("whole", "right"))
    rules = [rule for rule in contain.propose(whole) if "gradient" in contain.say(rule)]
    assert rules
    seen = contain.examples(thawed, rules).frame
    assert seen["passed"].any()
    assert [contain.say(rules[i]) for i in seen.filter(~seen["passed"])["hyp"].unique()] == []
