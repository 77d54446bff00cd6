"""Rules on gradients (`contain`) where a program thaws a part of its model in the middle of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.trained import record

pytest.importorskip("torch")

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
}


def test_a_parameter_needs_no_gradient_in_the_last_step_before_it_is_thawed(tmp_path: Path) -> None:
    record(tmp_path, PROGRAMS, [("thaws", "whole", 0, 8, "whole"), ("thaws", "right", 0, 8, "")])
    contain = registry()["contain"]
    whole, thawed = (Trace.load([tmp_path / f"thaws-{name}"]) for name in ("whole", "right"))
    rules = [rule for rule in contain.propose(whole) if "gradient" in contain.say(rule)]
    assert rules
    seen = contain.examples(thawed, rules).frame
    assert seen["passed"].any()
    assert [contain.say(rules[i]) for i in seen.filter(~seen["passed"])["hyp"].unique()] == []
