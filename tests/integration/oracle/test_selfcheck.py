"""`proctor oracle self` on whole programs: found, silent, and the job is the same bits with and without."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.warm import python

pytest.importorskip("torch")

PROGRAM = '''
import sys, torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
BUG = sys.argv[1] if len(sys.argv) > 1 else ""
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.norm, self.two, self.count = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3), 0
    def forward(self, x):
        h = self.norm(torch.tanh(self.one(x)))
        if BUG == "statistics":
            h = h - h.mean(0)
        if BUG == "counter":
            self.count += 1
            h = h / self.count
        return self.two(F.dropout(h, 0.2, training=self.training))
x = torch.randn(160, 6)
net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
for a, y in DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=16, shuffle=True):
    net.train()
    optimizer.zero_grad()
    parts = list(zip(a.chunk(2), y.chunk(2)))
    for b, z in parts:
        loss = F.cross_entropy(net(b), z)
        (loss if BUG == "accumulation" else loss / 2).backward()
    optimizer.step()
    schedule.step()
    print("LOSS", repr(loss.item()), float(sum(p.double().sum() for p in net.parameters())), flush=True)
'''
FAST = ["--skip", "determinism", "--skip", "compile"]


def check(tmp_path: Path, *arguments: str, bug: str = "", program: str = PROGRAM):
    script = tmp_path / "train.py"
    script.write_text(program)
    done = subprocess.run(
        [sys.executable, "-m", "proctor.cli", "oracle", "self", "--format", "json", "-o", str(tmp_path / "out"), *arguments, "--", python(), str(script), *([bug] if bug else [])],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), script


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("LOSS")]


def test_a_healthy_program_is_equivalent_and_its_losses_are_the_same_bits(tmp_path: Path):
    code, report, script = check(tmp_path, *FAST, "--to-the-end")
    assert code == 0, report["outcomes"][0]
    verdicts = {o["relation"]: o["verdict"] for o in report["outcomes"]}
    for name in ("neighbours", "permutation", "repeatable", "inputs", "parameters", "accumulation", "foreach", "resume", "workers", "checkpointing", "precision"):
        assert verdicts[name] == "equivalent", name
    assert verdicts["world"] == "by-design" and verdicts["compile"] == "inconclusive" and verdicts["causal"] == "not-applicable"
    assert all(o["reason"] for o in report["outcomes"])
    bare = subprocess.run([python(), str(script)], capture_output=True, text=True, timeout=600, check=True)
    watched = (tmp_path / "out" / "step" / "output.log").read_text(errors="replace")
    assert lines(watched) == lines(bare.stdout) and len(lines(watched)) == 10


@pytest.mark.parametrize(("bug", "relation", "line"), [("statistics", "neighbours", "h.mean(0)"), pytest.param("accumulation", "accumulation", "backward()", marks=pytest.mark.slow), pytest.param("counter", "resume", "", marks=pytest.mark.slow)])
def test_a_planted_bug_is_found_and_its_line_is_named(tmp_path: Path, bug: str, relation: str, line: str):
    code, report, script = check(tmp_path, *FAST, bug=bug)
    found = next(o for o in report["outcomes"] if o["relation"] == relation)
    assert code == 1 and found["verdict"] == "different", found
    if line:
        assert line in script.read_text().splitlines()[int(found["culprit"]["source"].rpartition(":")[2]) - 1]


CLOSURE = PROGRAM.replace("    optimizer.zero_grad()\n    parts", "    parts").replace("    for b, z in parts:\n", """    def closure():
        optimizer.zero_grad()
        for b, z in parts:
            loss = F.cross_entropy(net(b), z)
            (loss if BUG == "accumulation" else loss / 2).backward()
        return loss
    loss = optimizer.step(closure)
    nn.Flatten()(loss.detach().reshape(1, 1))  # as a trainer logs: a module without parameters
""").replace("""        loss = F.cross_entropy(net(b), z)
        (loss if BUG == "accumulation" else loss / 2).backward()
    optimizer.step()
""", "")  # fmt: skip


OUTSIDE = """
import torch
from torch import nn
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.transitions = nn.Linear(6, 3), nn.Parameter(torch.zeros(3, 3))
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(8):
    x = torch.randn(16, 6)
    optimizer.zero_grad()
    nn.functional.cross_entropy(net.body(x) @ (net.transitions + torch.eye(3)), x[:, :3].argmax(1)).backward()
    optimizer.step()
"""


def test_a_parameter_that_no_call_holds_is_no_state_that_a_resume_loses(tmp_path: Path):
    _, report, _ = check(tmp_path, "--only", "resume", "--to-the-end", program=OUTSIDE)
    assert {o["relation"]: o["verdict"] for o in report["outcomes"]} == {"resume": "equivalent"}


@pytest.mark.parametrize(("bug", "verdict"), [("", "equivalent"), ("accumulation", "different")])
def test_an_update_by_a_closure_is_the_one_that_the_closure_computes(tmp_path: Path, bug: str, verdict: str):
    assert CLOSURE.count("cross_entropy") == 1
    _, report, _ = check(tmp_path, "--only", "accumulation", "--only", "neighbours", "--only", "resume", "--to-the-end", bug=bug, program=CLOSURE)
    found = {o["relation"]: o["verdict"] for o in report["outcomes"]}
    assert found == {"accumulation": verdict, "neighbours": "equivalent", "resume": "equivalent"}


@pytest.mark.slow
def test_the_same_seed_and_another_order_of_a_set_is_found(tmp_path: Path):
    program = PROGRAM.replace("x = torch.randn(160, 6)", "x = torch.randn(160, 6) * torch.tensor([float(hash(w) % 7) for w in 'abcdef'])")
    code, report, _ = check(tmp_path, "--only", "determinism", "--only", "parameters", program=program)
    found = next(o for o in report["outcomes"] if o["relation"] == "determinism")
    assert code == 1 and found["verdict"] == "different" and "batch" in found["reason"]


@pytest.mark.slow
def test_a_program_with_one_update_is_checked_at_that_one(tmp_path: Path):
    code, report, _ = check(tmp_path, "--only", "parameters", program=PROGRAM.replace("    schedule.step()", "    break"))
    assert code == 0 and any("fewer" in note for note in report["notes"])


@pytest.mark.slow
def test_relations_within_the_process_leave_it_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What is done where no copy of the process can be made (CUDA)."""
    monkeypatch.setenv("PROCTOR_SELF_FORK", "0")
    code, report, script = check(tmp_path, *FAST, "--skip", "workers", "--to-the-end")
    assert code == 0, report["outcomes"][0]
    monkeypatch.delenv("PROCTOR_SELF_FORK")
    bare = subprocess.run([python(), str(script)], capture_output=True, text=True, timeout=600, check=True)
    assert lines((tmp_path / "out" / "step" / "output.log").read_text(errors="replace")) == lines(bare.stdout)


HOOKED = PROGRAM.replace("x = torch.randn", """from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
register_optimizer_step_pre_hook(lambda *_: None), register_optimizer_step_post_hook(lambda *_: None)
x = torch.randn""")


def test_a_program_with_hooks_of_its_own_goes_on_when_all_is_over(tmp_path: Path):
    code, report, _ = check(tmp_path, "--only", "parameters", "--to-the-end", program=HOOKED)
    assert code == 0 and len(lines((tmp_path / "out" / "step" / "output.log").read_text())) == 10, report


SAVING = PROGRAM + """
    if BUG == "forgets":
        torch.save({"model": net.state_dict(), "schedule": schedule.state_dict()}, sys.argv[0] + ".pt")
    elif BUG == "whole":
        torch.save({"model": net.state_dict(), "schedule": schedule.state_dict()}, sys.argv[0] + ".pt")
        torch.save(optimizer.state_dict(), sys.argv[0] + ".more.pt")
"""


@pytest.mark.parametrize(("bug", "verdict"), [("whole", "equivalent"), ("forgets", "different")])
def test_a_checkpoint_that_leaves_out_the_optimizer_is_found(tmp_path: Path, bug: str, verdict: str):
    code, report, script = check(tmp_path, "--only", "saved", bug=bug, program=SAVING)
    found = next(o for o in report["outcomes"] if o["relation"] == "saved")
    assert found["verdict"] == verdict and code == int(verdict == "different"), found
    assert "torch.save" in script.read_text().splitlines()[int(found["culprit"]["source"].rpartition(":")[2]) - 1]


VALUES = """
import sys, torch
from torch import nn
torch.manual_seed(0)
critic = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
for _ in range(5):
    states, returns = torch.randn(32, 4), torch.randn(32)
    values = critic(states) if len(sys.argv) > 1 else critic(states).squeeze(-1)
    optimizer.zero_grad()
    (values - returns).pow(2).mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("bug", "verdict"), [("", "equivalent"), ("broadcast", "different")])
def test_targets_that_are_broadcast_over_the_batch_are_found(tmp_path: Path, bug: str, verdict: str):
    _, report, script = check(tmp_path, "--only", "paired", bug=bug, program=VALUES)
    found = next(o for o in report["outcomes"] if o["relation"] == "paired")
    assert found["verdict"] == verdict, found
    if bug:
        assert "(values - returns)" in script.read_text().splitlines()[int(found["culprit"]["source"].rpartition(":")[2]) - 1]
