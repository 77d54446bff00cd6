"""A step that was kept is done again: what code did comes out again, what a device did does not."""

from __future__ import annotations

import os
import subprocess
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
from proctor.instrument.replay.again import Judgement, judge
from proctor.invariants.capsule import Capsule, capsules_of, read_capsule
from proctor.invariants.trace import Trace

FREEZE = """
def freeze(it, asked=%r):
    from proctor.instrument import attach
    if attach._observer is not None and attach._observer.capsules is not None and it == asked:
        attach._observer.capsules.freeze("found by a test", it)
def digest(*things):
    import hashlib
    h = hashlib.sha256()
    for t in things:
        h.update(t.detach().numpy().tobytes())
    print("DIGEST", h.hexdigest(), torch.rand(1).item(), flush=True)
"""
LOADED = """
import os, torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
data = TensorDataset(torch.randn(256, 16), torch.randint(0, 4, (256,)))
net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
optimizer = OPTIMIZER
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
it = 0
for epoch in range(2):
    for x, y in DataLoader(data, 32, shuffle=True):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        if it == int(os.environ.get("FLIP", "-1")):
            net[0].weight.grad.view(torch.int32)[3, 3] ^= 1 << 20
        optimizer.step()
        scheduler.step()
        freeze(it)
        it += 1
digest(*net.state_dict().values())
"""
ADAM = LOADED.replace("OPTIMIZER", "torch.optim.Adam(net.parameters(), 1e-2)")
MOMENTUM = LOADED.replace("OPTIMIZER", "torch.optim.SGD(net.parameters(), 1e-2, momentum=0.9)")
INDEXED = """
import torch
from torch import nn
torch.manual_seed(0)
inputs = torch.randn(256, 16)
targets = inputs @ torch.randn(16, 3)
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))
optimizer = torch.optim.SGD(net.parameters(), 1e-2, momentum=0.9)
criterion = nn.MSELoss()
for it in range(12):
    i = torch.randint(0, 256, (32,))
    loss = LOSS
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    freeze(it)
digest(*net.state_dict().values())
"""
RANKS = """
import sys, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
def rank(r, place):
    dist.init_process_group("gloo", init_method="file://" + place, rank=r, world_size=2)
    torch.manual_seed(0)
    net = nn.parallel.DistributedDataParallel(nn.Linear(8, 2))
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    criterion = nn.CrossEntropyLoss()
    torch.manual_seed(r)
    for it in range(6):
        x, y = torch.randn(4, 8), torch.randint(0, 2, (4,))
        optimizer.zero_grad()
        criterion(net(x), y).backward()
        optimizer.step()
        freeze(it)
    dist.destroy_process_group()
if __name__ == "__main__":
    import tempfile
    mp.spawn(rank, (tempfile.mktemp(),), nprocs=2)
"""


def record(folder: Path, program: str, asked: int = 7, capsules: int = 3, **settings: object) -> tuple[Path, str]:
    """Record a program that asks for one of its steps; gives the run and what the program said."""
    config = {"capsule_values": "always", **settings}
    environment = {k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}}
    environment |= {"OMP_NUM_THREADS": "1", **config.pop("variables", {})}  # type: ignore[dict-item, arg-type]
    folder.mkdir(exist_ok=True)
    script = folder / "train.py"
    script.write_text(FREEZE % asked + program)
    command = [python(), str(script)]
    run = folder / f"run{len(list(folder.glob('run*')))}"
    if capsules >= 0:
        create_run(run, command, overwrite=False)
        boot = write_boot(run, RecordConfig(run=str(run), capsules=capsules, **config))  # type: ignore[arg-type]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(boot), environment.get("PYTHONPATH")]))
    done = run_ranks(command, environment, 800)
    assert done.returncode == 0, done.stderr[-2000:]
    return run, "\n".join(line for line in done.stdout.splitlines() if line.startswith("DIGEST"))


def kept(run: Path, step: int) -> tuple[Path, Capsule]:
    return next((p, c) for p in capsules_of(run) if (c := read_capsule(p)).step == step)


def again(run: Path, step: int = 7) -> Judgement:
    return judge(kept(run, step)[0], timeout_s=400)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_keeping_steps_changes_nothing_and_a_deterministic_step_comes_out_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, said = record(tmp_path, ADAM)
    assert said and said == record(tmp_path, ADAM, capsules=-1)[1]
    assert not Trace.load([run]).processes[0].notes
    path, capsule = kept(run, 7)
    assert capsule.by_value and not capsule.absent and kept(run, 6)[1].control == 7
    assert main(["capsule", "replay", str(path)]) == 0
    assert "reproduced" in capsys.readouterr().out


def test_a_flipped_bit_does_not_come_out_again(tmp_path: Path) -> None:
    found = again(record(tmp_path, MOMENTUM, variables={"FLIP": "7"})[0])
    assert (found.verdict, found.control) == ("differs", "reproduced")
    assert (found.differences[0].stage, found.differences[0].name) == ("gradient", "0.weight")


@pytest.mark.slow
def test_batches_without_a_loader_come_back_as_arguments(tmp_path: Path) -> None:
    run, _ = record(tmp_path, INDEXED.replace("LOSS", "criterion(net(inputs[i]), targets[i])"))
    assert again(run).verdict == "reproduced"


@pytest.mark.slow
def test_targets_that_nothing_saw_accuse_nobody(tmp_path: Path) -> None:
    run, _ = record(tmp_path, INDEXED.replace("LOSS", "((net(inputs[i]) - targets[i]) ** 2).mean()"))
    found = again(run)
    assert found.verdict == "cannot" and found.differences[0].stage == "loss"


@pytest.mark.slow
def test_all_ranks_do_the_step_again_together(tmp_path: Path) -> None:
    run, _ = record(tmp_path, RANKS, asked=4)
    assert sorted(read_capsule(p).rank for p in capsules_of(run)) == [0, 0, 1, 1]
    assert again(run, 4).verdict == "reproduced"


def test_what_does_not_fit_or_comes_too_late_is_said(tmp_path: Path) -> None:
    program = ADAM.replace("freeze(it)", "freeze(it, 7); freeze(it - 5, 7)").replace(
        "digest(*net", "import time; time.sleep(0.3); freeze(15, 15); freeze(99, 99); digest(*net"
    )
    run, _ = record(tmp_path, program, asked=-1, capsule_values="auto", capsule_budget=8 << 10)
    process = Trace.load([run]).processes[0]
    _, capsule = kept(run, 7)
    assert not capsule.by_value and any("the budget is" in text for text in capsule.absent)
    assert any(v.before is not None and v.after is not None for v in capsule.state)
    assert judge(kept(run, 7)[0]).verdict == "cannot"
    assert all("probe" not in note for note in process.notes)


def test_the_disk_budget_is_kept(tmp_path: Path) -> None:
    run, said = record(tmp_path, ADAM, capsule_every=2, capsule_disk=120 << 10)
    sizes = [sum(f.stat().st_size for f in p.iterdir()) for p in capsules_of(run)]
    assert sizes and sum(sizes) < 160 << 10
    assert any("[disk]" in note for note in Trace.load([run]).processes[0].notes)
    assert said


def test_nothing_is_kept_unless_asked(tmp_path: Path) -> None:
    run, _ = record(tmp_path, ADAM, capsules=0)
    assert not (run / "capsules").exists()
    assert subprocess.run([sys.executable, "-m", "proctor.cli", "capsule", "list", str(run)], check=False).returncode == 0
