"""Parameters whose contents are swapped when a module is moved, as those of FSDP2 are: torch refuses where somebody refers to one weakly, which we do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl
import pytest
from helpers.trained import record, trace_of

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("torch")
import weakref

import torch

from proctor.instrument.observe.refs import TensorRef, swapping

PROGRAM = """
torch.__future__.set_swap_module_params_on_conversion(True)
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
def train(dtype):
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4, dtype=dtype)).square().mean().backward()
        optimizer.step()
train(torch.float32)
model.to(torch.float64)
for state in optimizer.state.values():
    state.update({k: v.double() for k, v in state.items() if k != "step"})
train(torch.float64)
open(OUT + ".done", "w").write(str(model[0].weight.dtype))
"""


def test_a_module_is_moved_and_its_parameters_are_followed(tmp_path: Path) -> None:
    record(tmp_path, {"moves": PROGRAM}, [("moves", "run", 0, 4, "")])
    assert (tmp_path / "moves-run.done").read_text() == "torch.float64"
    trace = trace_of(tmp_path / "moves-run")
    data = trace.variables.filter((pl.col("attr") == "data") & (pl.col("role") == "parameter"))
    states = trace.states.join(data.select("var", "name"), on="var").join(trace.contexts.select("ctx", "step"), on="ctx")
    assert data["name"].n_unique() == 4
    steps = states.filter(pl.col("step") >= 3).group_by("name").agg(pl.col("step").unique().sort())
    assert steps.height == 4 and all({3, 4, 5} <= set(of) for of in steps["step"].to_list())


def test_a_reference_of_the_program_still_stops_it() -> None:
    a, b = torch.zeros(2), torch.ones(2)
    ours = TensorRef(a)
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(a, b)
    swapping(torch.utils.swap_tensors, a, b)
    assert ours() is a and a.tolist() == [1.0, 1.0]
    theirs = weakref.ref(b)
    with pytest.raises(RuntimeError, match="weakref"):
        swapping(torch.utils.swap_tensors, a, b)
    assert theirs() is b and torch.utils.swap_tensors.__globals__["weakref"] is weakref
