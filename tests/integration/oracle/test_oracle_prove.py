"""`proctor oracle prove` on commands with real ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from helpers.warm import python

from proctor.cli import main
from proctor.oracle.prove.lanes import spread

SCRIPT = '''
import sys, tempfile, os
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn

def step(rank, world, path, broken):
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.randn(4, 3)
    loss = model(x.chunk(world)[rank]).square().mean()
    loss.backward()
    if world > 1:
        for k, p in enumerate(model.parameters()):
            if k == 0:  # gloo ends it where it is waited for
                part = torch.empty(p.numel() // world)
                dist.reduce_scatter_tensor(part, p.grad.view(-1))
                dist.all_gather_into_tensor(p.grad.view(-1), part / world)
            elif not (broken and k == 2):
                dist.all_reduce(p.grad)
                p.grad /= world
    optimizer.step()
    if world > 1:
        dist.destroy_process_group()

if __name__ == "__main__":
    world = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        if world == 1:
            step(0, 1, "", False)
        else:
            mp.spawn(step, (world, os.path.join(folder, "store"), "broken" in sys.argv), nprocs=world)
'''


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return f"{python()} {path}"


def test_commands_are_proved_and_the_proof_is_checked(script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    proof = tmp_path / "step.proof"
    assert main(["oracle", "prove", "--reference", f"{script} 1", "--candidate", f"{script} 2", "--save", str(proof)]) == 0
    assert "PROVED" in capsys.readouterr().out
    assert main(["oracle", "prove", "--check", str(proof)]) == 0


def test_a_gradient_that_is_not_reduced_is_refuted(script: str, tmp_path: Path) -> None:
    out = tmp_path / "verdict.json"
    assert main(["oracle", "prove", "--reference", f"{script} 1", "--candidate", f"{script} 2 broken", "--json", str(out)]) == 1
    verdict = json.loads(out.read_text())
    assert verdict["verdict"] == "DIFFERENT"
    assert {name.split()[1] for name in verdict["wrong"]} == {"2.weight"}
    assert verdict["culprit"]["kind"] == "missing collective" and verdict["culprit"]["parameter"] == "2.weight"


def test_bad_input_is_one_line(script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["oracle", "prove", "--reference", f"{script} 1"]) == 2
    assert main(["oracle", "prove", "--check", str(tmp_path / "none")]) == 2
    assert main(["oracle", "prove", "--reference", f"{python()} -c pass", "--candidate", f"{script} 2"]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert len(said) == 3 and "without training" in said[-1]


ALONE = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
update = torch.optim.AdamW(model.parameters(), lr=0.1)
if "refuse" in sys.argv:
    raise ValueError("two ranks are one too many")
x, target = torch.randn(4, 4), torch.randn(4, 4)
nn.functional.mse_loss(model(x), target).backward()
update.step()
"""
TENSOR = """
[mesh]
axes = ["tp"]
sizes = [2]

[[style]]
style = "colwise"
module = '0'
axis = "tp"

[[style]]
style = "rowwise"
module = '2'
axis = "tp"
"""
ROWS = """
[mesh]
axes = ["dp"]
sizes = [2]

[[redistribute]]
module = ''
at = "input"
to = { dp = 0 }

[[redistribute]]
module = ''
at = "output"
from = { dp = 0 }

[[pending]]
path = '.*'
axes = ["dp"]
reduce = "avg"
"""


def test_a_plan_is_judged_before_any_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(ALONE)
    plans = {"right": TENSOR, "wrong": ROWS, "absent": TENSOR.replace("'2'", "'7'")}
    for name, text in plans.items():
        (tmp_path / f"{name}.toml").write_text(text)
    judge = {name: ["oracle", "prove", "--plan", str(tmp_path / f"{name}.toml"), "--", sys.executable, str(tmp_path / "train.py")] for name in plans}  # made-up groups have to be there before torch is
    assert main(judge["right"]) == 0
    assert "PROVED" in capsys.readouterr().out
    assert main(judge["wrong"]) == 1
    out = capsys.readouterr().out
    assert "wrong scale" in out and "1/2 times the reference's" in out
    assert main(judge["absent"]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert len(said) == 1 and "matches nothing" in said[0]


def test_a_plan_on_a_large_mesh_is_proved_beside_by_one_of_several_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(ALONE)
    (tmp_path / "plan.toml").write_text(TENSOR.replace("sizes = [2]", "sizes = [4]"))
    assert main(["oracle", "prove", "--many", "--jobs", "2", "--plan", str(tmp_path / "plan.toml"), "--no-cache", "--", python(), str(tmp_path / "train.py")]) == 0
    said = capsys.readouterr().out
    assert "PROVED: the small program (tp=2)" in said and "ranks 0, 1, 3 (3 of 4)" in said, said


def test_a_plan_on_a_large_mesh_is_proved_by_a_small_one_on_a_cluster_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    distributed = pytest.importorskip("dask.distributed")
    wide = ALONE.replace("nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)", "nn.Linear(4, width), nn.GELU(), nn.Linear(width, 4)").replace("torch.manual_seed(0)", "width = int(sys.argv[1])\ntorch.manual_seed(0)")
    (tmp_path / "train.py").write_text(wide)
    (tmp_path / "plan.toml").write_text(TENSOR.replace("sizes = [2]", "sizes = [4]"))
    judge = ["oracle", "prove", "--many", "--plan", str(tmp_path / "plan.toml"), "--no-cache"]
    program = [python(), str(tmp_path / "train.py")]
    with distributed.LocalCluster(n_workers=1, threads_per_worker=1, processes=True, dashboard_address=None) as cluster:
        assert main([*judge, "--dask", cluster.scheduler_address, "--", *program, "8"]) == 0
    said = capsys.readouterr().out
    assert "PROVED: the small program (tp=2)" in said and "ranks 0, 1, 3 (3 of 4)" in said, said
    out = tmp_path / "verdict.json"
    assert main([*judge, "--small", " ".join([*program, "3.5"]), "--json", str(out), "--", *program, "8"]) == 0
    verdict = json.loads(out.read_text())
    assert verdict["verdict"] == "EQUAL" and "not proved" in verdict["why"], verdict
    assert main([*judge[:2], "--small", "python x.py", *judge[3:], "--", *program, "8"]) == 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spread, "_CONNECT_S", 1)
        assert main([*judge, "--dask", "nowhere:1", "--", *program, "8"]) == 2


def test_a_program_that_refuses_its_world_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(ALONE)
    command = f"{python()} {tmp_path / 'train.py'}"
    assert main(["oracle", "prove", "--reference", command, "--candidate", f"{command} refuse"]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert len(said) == 1 and "one too many" in said[0], said
