"""A step that was kept is done again by a reference, which confirms or clears it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from helpers.ranks import run_ranks
from helpers.warm import python

pytest.importorskip("torch")
pytest.importorskip("safetensors")
from proctor.cli import main
from proctor.instrument.config import RecordConfig
from proctor.instrument.record.rundir import create_run, write_boot
from proctor.invariants.capsule import capsules_of, read_capsule
from proctor.verify.service.confirm import Reference

NET = """
import torch
from torch import nn
import torch.nn.functional as F
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.norm = nn.Embedding(32, 16), nn.LayerNorm(16)
        self.up, self.down, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 32)
    def forward(self, ids):
        x = self.emb(ids)
        return self.head(x + self.down(torch.relu(self.up(self.norm(x)))))
"""
JOB = NET + """
import tempfile, torch.distributed as dist, torch.multiprocessing as mp
def freeze(it):
    from proctor.instrument import attach
    if attach._observer is not None and it in (3, 6):
        attach._observer.capsules.freeze(f"asked for {it}", it)
def rank(r, place):
    dist.init_process_group("gloo", init_method="file://" + place, rank=r, world_size=2)
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 10))
    torch.manual_seed(10 + r)
    for it in range(9):
        ids = torch.randint(0, 32, (4, 9))
        optimizer.zero_grad()
        F.cross_entropy(net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        for name, p in net.named_parameters():
            if it < 6 or name != "up.bias":
                dist.all_reduce(p.grad)
                p.grad /= 2
        optimizer.step()
        schedule.step()
        freeze(it)
    dist.destroy_process_group()
if __name__ == "__main__":
    mp.spawn(rank, (tempfile.mktemp(),), nprocs=2)
"""
REFERENCE = NET + """
import sys
torch.manual_seed(3)
net, parts = Net(), int(sys.argv[1])
optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
for it in range(2):
    optimizer.zero_grad()
    for _ in range(parts):
        ids = torch.randint(0, 32, (8 // parts, 9))
        (F.cross_entropy(net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()) / parts).backward()
    optimizer.step()
"""
ALONE = """
import torch
from torch import nn
torch.manual_seed(SEED)
inputs = torch.randn(256, 16)
targets = inputs @ torch.randn(16, 3)
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))
optimizer = torch.optim.SGD(net.parameters(), 1e-2, momentum=0.9)
for it in range(9):
    i = torch.randint(0, 256, (32,))
    loss = LOSS
    loss.backward()
    CHANGE
    optimizer.step()
    optimizer.zero_grad()
    try:
        from proctor.instrument import attach
        if it == 6:
            attach._observer.capsules.freeze("asked for 6", it)
    except AttributeError:
        pass
"""
SEEN, UNSEEN = "nn.functional.mse_loss(net(inputs[i]), targets[i])", "((net(inputs[i]) - targets[i]) ** 2).mean()"


def alone(seed: int, loss: str = SEEN, change: str = "pass") -> str:
    return ALONE.replace("SEED", str(seed)).replace("LOSS", loss).replace("CHANGE", change)


def record(folder: Path, program: str, values: str = "always") -> Path:
    """A run of a program that asks for some of its steps."""
    script, run = folder / "job.py", folder / "run"
    script.write_text(program)
    command = [python(), str(script)]
    create_run(run, command, overwrite=False)
    boot = write_boot(run, RecordConfig(run=str(run), capsules=4, capsule_values=values))
    environment = {k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(boot), environment.get("PYTHONPATH")]))
    done = run_ranks(command, environment, 800)
    assert done.returncode == 0, done.stderr[-2000:]
    return run


def replayed(run: Path, step: int, reference: str, *words: str, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    script = run.parent / "reference.py"
    script.write_text(reference)
    capsule = next(p for p in capsules_of(run) if (c := read_capsule(p)).step == step and c.control is None)
    command = " ".join([python(), str(script), *words])
    code = main(["oracle", "replay", str(capsule), "--reference", command, "--samples", "1", "--format", "json"])
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    assert code == {"cleared": 0, "confirmed": 1, "inconclusive": 3}[str(found["verdict"])]
    return found


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_a_wrong_step_is_confirmed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = replayed(record(tmp_path, JOB), 6, REFERENCE, "2", capsys=capsys)
    assert (wrong["verdict"], wrong["loss"]) == ("confirmed", True)
    assert {f["name"] for f in wrong["wrong"]} == {"up.bias"}  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_healthy_step_is_cleared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    healthy = replayed(record(tmp_path, JOB), 3, REFERENCE, "2", capsys=capsys)
    assert (healthy["verdict"], healthy["loss"]) == ("cleared", True)


@pytest.mark.slow
def test_a_reference_may_take_the_data_in_one_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = record(tmp_path, JOB)
    assert replayed(run, 3, REFERENCE, "1", capsys=capsys)["verdict"] == "cleared"
    assert "accumulate" in str(replayed(run, 3, REFERENCE.replace("range(parts)", "range(1)"), "2", capsys=capsys)["reason"])


@pytest.mark.slow
def test_one_process_with_dropout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = record(tmp_path, alone(0))
    assert replayed(run, 6, alone(1), capsys=capsys)["verdict"] == "cleared"


@pytest.mark.slow
def test_an_update_that_does_too_much(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = record(tmp_path, alone(0, change="it == 6 and net[3].weight.data.mul_(1.01)"))
    found = replayed(run, 6, alone(1), capsys=capsys)
    assert (found["verdict"], found["first"]["kind"], found["first"]["name"]) == ("confirmed", "parameter", "3.weight")  # type: ignore[index]


@pytest.mark.slow
def test_targets_that_no_capsule_holds_accuse_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = replayed(record(tmp_path, alone(0, UNSEEN)), 6, alone(1, UNSEEN), capsys=capsys)
    assert found["verdict"] == "inconclusive" and "loss" in str(found["reason"])


@pytest.mark.slow
def test_without_values_nothing_can_be_said_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = record(tmp_path, alone(0), values="never")
    found = replayed(run, 6, alone(1), capsys=capsys)
    assert found["verdict"] == "inconclusive" and "by value" in str(found["reason"])
    answer = Reference(run, f"{sys.executable} nowhere.py")("asked for 6", 8.0)
    assert answer.verdict == "inconclusive" and "by value" in answer.reason
