"""Plans with fully_shard (dp x tp, sequence parallel, ZeRO-3) in four processes on gloo train what one device trains."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from helpers.oracle import parallel_zoo as zoo
from helpers.oracle.parallel_gpt import plan
from helpers.warm import python

from proctor.errors import OracleError
from proctor.oracle import Plan
from proctor.oracle.parallel import deferred, parallelize, run_threads
from proctor.oracle.plans.mesh import Mesh

JOB = Path(__file__).parents[2] / "helpers" / "oracle" / "jobs" / "parallel_zero_job.py"
TESTS = str(Path(__file__).parents[2])


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """What four processes saw, for every model that is installed here."""
    pytest.importorskip("transformers")
    models = ["llama", "mixtral"]
    try:
        import diffusers  # noqa: F401

        models.append("dit")
    except ImportError:
        pass
    out = tmp_path_factory.mktemp("zero") / "said.json"
    command = [python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(JOB), str(out), *models]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize("of", ["llama", "mixtral", "dit"])
def test_zero_trains_what_one_device_trains(job, of, defer):
    if f"{of} {defer}" not in job:
        pytest.skip("diffusers is not installed")
    found = job[f"{of} {defer}"]
    torch.manual_seed(0)
    model = deferred(zoo.MODELS[of], 0.2) if defer else zoo.MODELS[of](0.2)
    parallelize(model.train(), plan(f"{of}_4d.toml").on(Mesh(("dp", "tp"), (1, 1))), seed=0)
    whole = sum(p.numel() for p in model.parameters())
    assert found["said"] == pytest.approx(zoo.train(model, of, 3), abs=1e-5)
    state = model.state_dict()
    assert found["sums"].keys() == state.keys()
    for name, value in state.items():
        assert found["sums"][name] == pytest.approx(float(value.double().square().sum()), rel=1e-4, abs=1e-6), name
    assert found["held"] < 0.62 * whole  # replicated along tp and cut along dp at most
    assert found["loaded"]


def test_threads_are_refused_in_one_line():
    rules = Plan("dp=2").style("batch", "", "dp").fully_shard("", axis="dp")
    with pytest.raises(OracleError, match="fully_shard needs processes"):
        run_threads(lambda rank: parallelize(torch.nn.Linear(4, 4), rules), 2)
