"""The plans of examples/parallel on the real classes of transformers and diffusers: losses and gradients of one device."""

import threading

import pytest
import torch
from helpers.oracle import parallel_zoo as zoo
from helpers.oracle.parallel_gpt import plan

from proctor.oracle.parallel import parallelize, run_threads
from proctor.oracle.parallel.verify import problems
from proctor.oracle.plans.mesh import Mesh

pytest.importorskip("transformers")
_one_at_a_time = threading.Lock()
CASES = [(name, of) for of, names in zoo.PLANS.items() for name in names]


def steps(name, of, mesh, dropout=0.0):
    """Loss and gradient norm of three steps."""
    with _one_at_a_time:
        torch.manual_seed(0)
        model = zoo.MODELS[of](dropout).train()
    if mesh is not None:
        parallelize(model, plan(f"{name}.toml").on(mesh), seed=0)
    return zoo.train(model, of, 3)


def skip_what_is_not_here(of):
    pytest.importorskip(zoo.LIBRARY.get(of, "transformers"))


@pytest.mark.parametrize(("name", "of"), CASES)
def test_the_plan_can_run(name, of):
    skip_what_is_not_here(of)
    assert problems(plan(f"{name}.toml"), zoo.MODELS[of](0.1)) == []


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize(("name", "of"), CASES)
def test_three_steps_are_those_of_one_device(name, of, dropout):
    skip_what_is_not_here(of)
    wanted = steps(name, of, Mesh(("dp", "tp"), (1, 1)), dropout)
    if dropout == 0.0:
        assert steps(name, of, None) == pytest.approx(wanted, abs=1e-5)
    for found in run_threads(lambda rank: steps(name, of, Mesh(("dp", "tp"), (2, 2)), dropout), 4):
        assert found == pytest.approx(wanted, abs=1e-5)
