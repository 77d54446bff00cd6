"""Who wrote a gradient, in an optimizer that clips each parameter by itself: the clip, or what stands around it."""

from __future__ import annotations

import polars as pl
import pytest
from helpers.trained import record

pytest.importorskip("torch")
from proctor.invariants.trace import Trace

PROGRAM = """
class Own(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                torch.nn.utils.clip_grad_norm_(p if BUG == "alone" else iter([p]), 0.01)
                if p is model.weight:
                    model.bias.grad.mul_(3.0)  # of another parameter, before its own clip
        super().step()
model = nn.Linear(4, 3)
optimizer = Own(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    folder = tmp_path_factory.mktemp("clips")
    record(folder, {"clips": PROGRAM}, [("clips", how, 0, 4, how) for how in ("alone", "all")])
    return {how: Trace.load([folder / f"clips-{how}"]) for how in ("alone", "all")}


def writers(trace: Trace) -> list[tuple[str, str, int]]:
    """Of each change of a gradient in step 1: the parameter, the function at which it was seen, and whether before (0) or behind it (1)."""
    states = trace.states.join(trace.variables.filter(pl.col("attr") == "grad").select("var", "name"), on="var", how="inner", maintain_order="left")
    states = states.join(trace.contexts.select("ctx", "step"), on="ctx").filter(pl.col("step") == 1)
    calls = trace.calls.select("proc", pl.col("seq").alias("call"), "fn")
    rows = states.join(calls, on=["proc", "call"], how="left", maintain_order="left")
    return [(row["name"], trace.functions[row["fn"]].rpartition(".")[2], row["edge"]) for row in rows.to_dicts()]


def test_a_change_is_that_of_who_made_it(runs: dict[str, Trace]) -> None:
    told = writers(runs["alone"])
    for name in ("weight", "bias"):
        assert (name, "clip_grad_norm_", 1) in told
    # The bias was multiplied before it was clipped: not by the clip.
    bias = [(function, edge) for name, function, edge in told if name == "bias"]
    assert bias.index(("clip_grad_norm_", 0)) < bias.index(("clip_grad_norm_", 1))


def test_a_look_at_one_parameter_sees_of_it_what_a_look_at_all_sees(runs: dict[str, Trace]) -> None:
    """Where an iterator is given, which is not ours to read, all are looked at: the weight's clip tells what was done to the bias, too."""
    alone, every = ([row for row in writers(runs[how]) if row[0] == "weight"] for how in ("alone", "all"))
    assert alone == every
