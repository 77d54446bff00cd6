"""The plans of examples/parallel on the real classes of transformers and diffusers: losses and gradients of one device."""

import threading

import pytest
import torch
from helpers.oracle import parallel_zoo as zoo
from helpers.oracle.parallel_gpt import plan

from proctor.errors import OracleError
from proctor.oracle.parallel import deferred, parallelize, run_threads
from proctor.oracle.parallel.deriving import derive
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
        rules = plan(f"{name}.toml").on(mesh)
        rules.shards.clear()  # threads have no process group; test_parallel_zero has processes
        parallelize(model, rules, seed=0)
    return zoo.train(model, of, 3)


def skip_what_is_not_here(of):
    pytest.importorskip(zoo.LIBRARY.get(of, "transformers"))


@pytest.mark.parametrize(("name", "of"), CASES)
def test_the_plan_can_run(name, of):
    skip_what_is_not_here(of)
    assert problems(plan(f"{name}.toml"), zoo.MODELS[of](0.1)) == []


@pytest.mark.parametrize(("name", "of"), CASES)
def test_deferred_values_are_those_of_the_class_itself(name, of):
    skip_what_is_not_here(of)
    torch.manual_seed(0)
    wanted = zoo.MODELS[of](0.0).state_dict()
    if of == "vit":
        with pytest.raises(OracleError, match="looks at values while it initialises"):  # trunc_normal_ rejects what is too large
            deferred(zoo.MODELS[of], 0.0)
        return
    model = deferred(zoo.MODELS[of], 0.0)
    torch.manual_seed(0)
    state = parallelize(model, plan(f"{name}.toml").on(Mesh(("dp", "tp"), (1, 1))), rng="stock", seed=0).state_dict()
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize(("name", "of"), CASES)
def test_three_steps_are_those_of_one_device(name, of, dropout):
    skip_what_is_not_here(of)
    wanted = steps(name, of, Mesh(("dp", "tp"), (1, 1)), dropout)
    if dropout == 0.0:
        assert steps(name, of, None) == pytest.approx(wanted, abs=1e-5)
    for found in run_threads(lambda rank: steps(name, of, Mesh(("dp", "tp"), (2, 2)), dropout), 4):
        assert found == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(("name", "dropout"), [("llama", 0.0), ("mixtral", 0.2)])
def test_stages_of_a_pipeline_train_what_one_device_trains(name, dropout):
    def staged(sizes):
        with _one_at_a_time:
            torch.manual_seed(0)
            model = zoo.MODELS[name](dropout).train()
        rules = plan(f"{name}.toml").on(Mesh(("pp", "dp", "tp"), sizes))
        parallelize(model, rules.pipeline(r"model\.embed_tokens|model\.layers\.0", r"model\.layers\.1|model\.norm|lm_head", axis="pp", microbatches=2), seed=0)
        return zoo.train(model, name, 3)

    wanted = staged((1, 1, 1))
    if dropout == 0.0:
        assert steps(name, name, None) == pytest.approx(wanted, abs=1e-5)
    for found in run_threads(lambda rank: staged((2, 1, 2)), 4):
        assert found == pytest.approx(wanted, abs=1e-5)


def batch(of):
    generator = torch.Generator().manual_seed(1)
    if of == "vit":
        return {"pixel_values": torch.randn(4, 3, 16, 16, generator=generator), "labels": torch.randint(0, 8, (4,), generator=generator)}
    if of == "dit":
        times, labels = torch.randint(0, 1000, (4,), generator=generator), torch.randint(0, 16, (4,), generator=generator)
        return {"hidden_states": torch.randn(4, 4, 8, 8, generator=generator), "timestep": times, "class_labels": labels}
    tokens = torch.randint(0, 64, (4, 12), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


@pytest.mark.parametrize(("of", "source"), [*((of, "model") for of in zoo.MODELS), ("llama", "tp_plan"), ("mixtral", "tp_plan")])
def test_a_plan_that_nobody_wrote_trains_what_one_device_trains(of, source):
    skip_what_is_not_here(of)
    torch.manual_seed(0)
    model = zoo.MODELS[of](0.2)
    found = derive(model, batch(of), "dp=2,tp=2", source=source)
    assert found.notes == () and found.apart == ()
    # As much is cut as by the plan that was written by hand.
    cut = {name for name, _ in model.named_parameters() if found.plan.param_layout(name)}
    by_hand = plan(f"{zoo.PLANS[of][0]}.toml")
    assert {name for name, _ in model.named_parameters() if (layout := by_hand.param_layout(name)) and layout.cuts} <= cut
