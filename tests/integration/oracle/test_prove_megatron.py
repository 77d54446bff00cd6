"""Megatron-core's own tensor, sequence, expert and pipeline parallelism, unchanged: the same formulas as one process."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from proctor.cli import main

pytest.importorskip("torch")
if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

TRAIN = f"{Path(__file__).parents[3] / 'examples' / 'megatron' / 'train.py'} --hidden 8 --heads 2 --length 4 --vocab 16 --micro-batches 2 --batch-size 1 --clip 0"


@pytest.mark.parametrize(
    ("both", "how"),
    [("--layers 1 --experts 4 --swiglu", "--tp 2 --sequence-parallel"), ("--layers 2 --tied", "--pp 2")],
)
def test_it_is_proved(both: str, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = main(["oracle", "prove", "--no-cache", "--reference", f"{sys.executable} {TRAIN} {both}", "--candidate", f"{sys.executable} -m torch.distributed.run --nproc-per-node 2 {TRAIN} {both} {how}"])
    said = capsys.readouterr().out
    assert found == 0 and "PROVED" in said and "UNPROVED" not in said, said
