"""`oracle run --rng keyed`: dropout is compared as it drops, on ranks that draw their parts of what one device draws."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

PROGRAM = Path(__file__).parents[3] / "examples" / "oracle" / "parallel_gpt.py"
MESH = '[mesh]\naxes = ["tp"]\nsizes = [2]\n'
INSIDE = "[[draw]]\nmodule = 'layers\\.\\d+\\.attention'\nlayout = { tp = 1 }\n"
RESIDUAL = "[[draw]]\nmodule = 'layers\\.\\d+|embedding\\.drop'\nlayout = {}\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared, so that the reference is recorded once."""
    return tmp_path_factory.mktemp("keyed")


def compared(folder: Path, plan: str, *options: str) -> tuple[int, str]:
    """Exit code and text of a comparison of the GPT on two ranks with itself on one."""
    (folder / "plan.toml").write_text(plan)
    program = f"{sys.executable} {PROGRAM} --dropout 0.2 --layers 1 --steps 1 {' '.join(options)}"
    command = [
        sys.executable, "-m", "proctor.cli", "oracle", "run", "--rng", "keyed", "--plan", "plan.toml", "--samples", "2", "--no-localise",
        "--reference", program.partition(" --bug")[0], "--candidate", f"{program} --mesh tp=2",
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
    code, text = compared(folder, MESH + INSIDE)
    assert code == 2
    assert "embedding.drop draws random numbers" in text
    assert "no [[draw]] of a plan says how they lie on 2 ranks" in text
    assert "gpt.py:" in text
    assert "Traceback" not in text.partition("PR-E")[2]


def test_a_mask_that_the_plan_cuts_otherwise_than_the_program_is_different(folder: Path) -> None:
    code, text = compared(folder, MESH + INSIDE.replace("tp = 1", "") + RESIDUAL)
    assert code == 1, text
    assert "FIRST WRONG TENSOR layers.0.attention" in text
