"""`apart`: the parts of a parameter that is cut over ranks do not begin as copies of one block."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.ranks import run_ranks
from helpers.runs import write_run
from helpers.warm import python

from proctor.invariants.invariant import Hypothesis, Standing
from proctor.invariants.relations.apart import Apart
from proctor.invariants.schema import StateFlag
from proctor.invariants.trace import Trace

RELATION = Apart()
MODES = {"model": "cut parameters of a model", "parameter": "parts of a parameter"}
CONSTANT, ZERO = int(StateFlag.CONSTANT), int(StateFlag.ZERO)


def rank_of(rank: int, values: dict[str, tuple[str, int]], meta: dict[str, Any], flags: int = 0, **info: Any) -> dict[str, Any]:
    """A rank that holds parameters with a part and a value each, and updates them once."""
    states = []
    for name, (part, fp) in values.items():
        var = {"name": name, "attr": "data", "module": "torch.nn.Linear", "kind": "weight", "model": "lib.Model"}
        said = {"dtype": "float32", "shape": "[16,8]", "requires_grad": True, "optimizer": "#0", "placement": "Shard0", "part": part, **meta}
        states.append({"var": var, "step": -1, "seq": 0, "call": 0, "edge": 1, "fp": fp, "flags": flags, "meta": said, "norm": 1.0})
    return {"rank": rank, "calls": [{"fn": "torch.optim.Optimizer.step", "step": 0}], "states": states, **info}


def verdicts(path: Path, parts: list[dict[str, tuple[str, int]]], meta: dict[str, Any] | None = None, flags: int = 0, **info: Any) -> dict[str, list[bool | None]]:
    """By mode, what the examples of a run say."""
    ranks = [rank_of(i, values, meta or {}, flags, world=len(parts), **info) for i, values in enumerate(parts)]
    trace = Trace.load([write_run(path, ranks, program="train.py")])
    found = {}
    for mode, what in MODES.items():
        frame = RELATION.examples(trace, [Hypothesis.of("apart", mode=mode, what=what)]).frame
        found[mode] = frame["passed"].to_list()
    return found


def test_parts_that_differ_pass(tmp_path: Path) -> None:
    assert verdicts(tmp_path / "run", [{"a": ("0", 1)}, {"a": ("1", 2)}]) == {"model": [True, True], "parameter": [True, True]}


def test_one_block_on_all_ranks_fails(tmp_path: Path) -> None:
    assert verdicts(tmp_path / "run", [{"a": ("0", 1)}, {"a": ("1", 1)}]) == {"model": [False, False], "parameter": [False, False]}


def test_a_model_of_which_one_parameter_is_copied_breaks_the_choice_alone(tmp_path: Path) -> None:
    found = verdicts(tmp_path / "run", [{"a": ("0", 1), "b": ("0", 5)}, {"a": ("1", 1), "b": ("1", 6)}])
    assert found["model"] == [True, True]
    assert sorted(found["parameter"]) == [False, False, True, True]
    assert RELATION.standing_of(Hypothesis.of("apart", mode="parameter", what="")) is Standing.CHOICE
    assert RELATION.standing_of(Hypothesis.of("apart", mode="model", what="")) is Standing.LAW


def test_replicas_of_a_part_are_no_copies(tmp_path: Path) -> None:
    # dp 2 x tp 2: the same part twice, on ranks 0 and 2, and on 1 and 3.
    parts = [{"a": ("0", 1)}, {"a": ("1", 2)}, {"a": ("0", 1)}, {"a": ("1", 2)}]
    assert verdicts(tmp_path / "run", parts) == {"model": [True] * 4, "parameter": [True] * 4}


@pytest.mark.parametrize(
    ("parts", "meta", "flags"),
    [
        ([{"a": ("0", 1)}, {"a": ("0", 1)}], {}, 0),  # the same part
        ([{"a": ("0", 1)}, {"a": ("1", 1)}], {}, CONSTANT),
        ([{"a": ("0", 1)}, {"a": ("1", 1)}], {}, ZERO),
        ([{"a": ("0", 0)}, {"a": ("1", 0)}], {}, 0),  # without elements
        ([{"a": ("0", 1)}, {"a": ("1", 1)}], {"shape": "[4,4]"}, 0),  # few elements
        ([{"a": ("0", 1)}, {"a": ("1", 1)}], {"placement": "Replicate"}, 0),
        ([{"a": ("0", 1)}, {"a": ("0", 2)}, {"a": ("1", 1)}], {}, 0),  # replicas that parted: not known which one counts
    ],
)
def test_nothing_is_said_of_what_may_be_equal(tmp_path: Path, parts: Any, meta: dict[str, Any], flags: int) -> None:
    assert verdicts(tmp_path / "run", parts, meta, flags) == {"model": [], "parameter": []}


def test_lost_records_leave_it_undecided(tmp_path: Path) -> None:
    assert verdicts(tmp_path / "run", [{"a": ("0", 1)}, {"a": ("1", 1)}], dropped=3) == {"model": [None, None], "parameter": [None, None]}


def test_megatrons_marks_tell_parts_by_the_mesh(tmp_path: Path) -> None:
    marked = {"placement": None, "part": None, "attr.tensor_model_parallel": True}
    ranks = [rank_of(i, {"a": ("", 7)}, marked, world=2, coords={"tp": i}) for i in range(2)]
    trace = Trace.load([write_run(tmp_path / "run", ranks, program="train.py")])
    frame = RELATION.examples(trace, [Hypothesis.of("apart", mode="model", what=MODES["model"])]).frame
    assert frame["passed"].to_list() == [False, False]


PROGRAM = """
import sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32, bias=False), torch.nn.Linear(32, 16, bias=False))
parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "1": RowwiseParallel()})
if sys.argv[1] == "drawn after the cut":
    for layer in model:
        torch.nn.init.normal_(layer.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(4, 16)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("when", "copied"), [("drawn before the cut", False), ("drawn after the cut", True)])
def test_a_dtensor_that_is_initialised_after_it_was_cut(tmp_path: Path, when: str, copied: bool) -> None:
    import os

    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    launch = [python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program), when]
    command = [sys.executable, "-m", "proctor.cli", "record", "-o", str(tmp_path / "run"), "--", *launch]
    done = run_ranks(command, {**os.environ, "OMP_NUM_THREADS": "1"}, 120)
    assert done.returncode == 0, done.stderr[-2000:]
    trace = Trace.load([tmp_path / "run"])
    asked = [Hypothesis.of("apart", mode=mode, what=what) for mode, what in MODES.items()]
    frame = RELATION.examples(trace, asked).frame
    assert frame.height
    assert set(frame["passed"].to_list()) == {not copied}
