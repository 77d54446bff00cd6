"""`oracle run --rng keyed|stock`: dropout is compared as it drops, on ranks that draw their parts of what one device draws."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.warm import python

pytest.importorskip("torch")

PROGRAM = Path(__file__).parents[3] / "examples" / "oracle" / "parallel_gpt.py"
MESH = '[mesh]\naxes = ["tp"]\nsizes = [2]\n'
INSIDE = "[[draw]]\nmodule = 'layers\\.\\d+\\.attention'\nlayout = { tp = 1 }\n"
RESIDUAL = "[[draw]]\nmodule = 'layers\\.\\d+|embedding\\.drop'\nlayout = {}\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared, so that the reference is recorded once."""
    return tmp_path_factory.mktemp("keyed")


def compared(folder: Path, plan: str, *options: str, rng: str = "keyed", mesh: str = "tp=2") -> tuple[int, str]:
    """Exit code and text of a comparison of the GPT on ranks with itself on one."""
    program = f"{python()} {PROGRAM} --dropout 0.2 --layers 1 --steps 1 {' '.join(options)}"
    return judged(folder, plan, program.partition(" --bug")[0], f"{program} --mesh {mesh}", rng)


def judged(folder: Path, plan: str, reference: str, candidate: str, rng: str) -> tuple[int, str]:
    """Exit code and text of a comparison of two commands."""
    (folder / "plan.toml").write_text(plan)
    command = [
        python(), "-m", "proctor.cli", "oracle", "run", "--rng", rng, "--samples", "2", "--no-localise",
        *(["--plan", "plan.toml"] if plan else []), "--reference", reference, "--candidate", candidate,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def test_all_masks_are_those_of_one_device_and_a_mistake_is_found(folder: Path) -> None:
    code, text = compared(folder, MESH + INSIDE + RESIDUAL)
    assert code == 0, text
    assert "EQUIVALENT" in text
    assert "dropout masks" not in text  # nothing is kept from dropping
    code, text = compared(folder, MESH + INSIDE + RESIDUAL, "--bug", "masks_of_each_rank")
    assert code == 1, text
    assert "their generators are not alike" in text


def test_a_draw_that_no_rule_places_is_refused_with_its_line(folder: Path) -> None:
    code, text = compared(folder, MESH + "[[draw]]\nmodule = 'embedding\\.drop'\nlayout = {}\n")
    assert code == 2
    assert "layers.0.attention draws random numbers [8, 2, 16, 16]" in text
    assert "no [[draw]] of a plan says how they lie on 2 ranks" in text
    assert "it is not seen how they lie in the reference's [8, 4, 16, 16]" in text
    assert "gpt.py:" in text
    assert "Traceback" not in text.partition("PR-E")[2]


def test_a_mask_that_the_plan_cuts_otherwise_than_the_program_is_different(folder: Path) -> None:
    code, text = compared(folder, MESH + INSIDE.replace("tp = 1", "") + RESIDUAL)
    assert code == 1, text
    assert "FIRST WRONG TENSOR layers.0.attention" in text


def test_the_stock_stream_is_what_the_untouched_reference_draws_and_no_plan_is_needed(tmp_path: Path) -> None:
    code, text = compared(tmp_path, "", rng="stock", mesh="dp=2,tp=2")
    assert code == 0, text
    assert "EQUIVALENT" in text
    assert "dropout masks" not in text


REPLICAS = """
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        path = torch.floor(0.7 + torch.rand(x.shape[0], 1))    # DropPath, as models write it by hand
        return x + path * self.linear(x)


def train(rank, world, seed):
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}{os.getppid()}", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(16, 4))
    x, y = torch.randn(32, 16), torch.randn(32, 4)
    if seed == "apart":
        torch.manual_seed(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


if __name__ == "__main__":
    world = int(sys.argv[1])
    if world == 1:
        train(0, 1, "")
    else:
        torch.multiprocessing.spawn(train, (world, sys.argv[2]), world)
"""


def test_a_path_that_each_replica_drops_by_itself_is_named(tmp_path: Path) -> None:
    (tmp_path / "replicas.py").write_text(REPLICAS)
    program = f"{sys.executable} {tmp_path / 'replicas.py'}"  # a process whose parent is its own
    code, text = judged(tmp_path, "", f"{program} 1", f"{program} 2 apart {tmp_path / 'meet'}", "stock")
    assert code == 1, text
    assert "draw other random numbers for the same values" in text
