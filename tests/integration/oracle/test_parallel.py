"""A plan under torchrun: four processes on gloo train what one device trains."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from helpers.oracle.parallel_gpt import make, one
from helpers.warm import python

JOB = Path(__file__).parents[2] / "helpers" / "oracle" / "parallel_job.py"


@pytest.mark.parametrize(("rng", "name"), [("keyed", "gpt_sp.toml"), ("keyed", "gpt_pp.toml"), pytest.param("stock", "gpt.toml", marks=pytest.mark.slow)])
def test_four_processes_train_what_one_device_trains(tmp_path, rng, name):
    out = tmp_path / "said.json"
    command = [python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(JOB), str(out), rng, name]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    if rng == "stock":
        torch.manual_seed(0)
        wanted, model = _plain_after_its_own_initialisation()
    else:
        wanted, model = one(rng=rng, name=name, dropout=0.2, defer=True)
    for (loss, norm), (loss_one, norm_one) in zip(found["said"], wanted):
        assert abs(loss - loss_one) < 1e-5
        assert abs(norm - norm_one) < 1e-5
    state = model.state_dict()
    assert found["shapes"] == {name: list(value.shape) for name, value in state.items()}
    assert abs(found["sum"] - float(sum(v.double().abs().sum() for v in state.values()))) < 1e-2


def _plain_after_its_own_initialisation():
    """torch alone: one generator for the values and then for dropout, as a script has it."""
    from helpers.oracle import parallel_gpt

    model = make(0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    said = []
    for batch in parallel_gpt.batches(3):
        optimizer.zero_grad()
        loss = parallel_gpt.gpt().next_token_loss(model(batch[:, :-1]), batch[:, 1:])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        said.append((loss.item(), norm.item()))
    return said, model


