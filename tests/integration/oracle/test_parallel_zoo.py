"""The plans of examples/parallel on the real classes of transformers: losses and gradients of one device."""

import threading

import pytest
import torch
from helpers.oracle.parallel_gpt import plan

from proctor.oracle.parallel import parallelize, run_threads
from proctor.oracle.parallel.verify import problems
from proctor.oracle.plans.mesh import Mesh

transformers = pytest.importorskip("transformers")
_one_at_a_time = threading.Lock()


def llama(dropout):
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        attention_dropout=dropout, use_cache=False, attn_implementation="sdpa",
    )
    return transformers.LlamaForCausalLM(config)


def gpt2(dropout):
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, use_cache=False, attn_pdrop=dropout, resid_pdrop=dropout, embd_pdrop=dropout,
    )
    return transformers.GPT2LMHeadModel(config)


MODELS = {"llama": llama, "gpt2": gpt2}


def step(name, mesh, dropout=0.0):
    """Losses of three steps, and a gradient norm."""
    with _one_at_a_time:
        torch.manual_seed(0)
        model = MODELS[name](dropout).train()
    if mesh is not None:
        parallelize(model, plan(f"{name}.toml").on(mesh), seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(0, 64, (4, 12), generator=torch.Generator().manual_seed(1))
    said = []
    for _ in range(3):
        optimizer.zero_grad()
        out = model(input_ids=tokens, labels=tokens)
        out.loss.backward()
        said += [out.loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()]
        assert out.logits.shape == (4, 12, 64)
        optimizer.step()
    return said


@pytest.mark.parametrize("name", MODELS)
def test_the_plan_can_run(name):
    assert problems(plan(f"{name}.toml"), MODELS[name](0.1)) == []


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_three_steps_are_those_of_one_device(name, dropout):
    wanted = step(name, Mesh(("dp", "tp"), (1, 1)), dropout)
    if dropout == 0.0:
        assert step(name, None) == pytest.approx(wanted, abs=1e-5)
    for found in run_threads(lambda rank: step(name, Mesh(("dp", "tp"), (2, 2)), dropout), 4):
        assert found == pytest.approx(wanted, abs=1e-5)
