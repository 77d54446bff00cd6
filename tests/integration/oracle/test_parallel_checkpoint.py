"""Checkpoints by torch's DCP: saved under a plan and loaded on one device, the other way round, and on another mesh; optimizer included."""

import importlib.util
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.oracle import parallel_checkpoint_job as job
from helpers.warm import python
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from proctor.errors import OracleError
from proctor.oracle.parallel import parallelize, run_threads
from proctor.oracle.parallel.checkpoint import load, save
from proctor.oracle.plans.mesh import Mesh

JOB = Path(job.__file__)


def run(what, ranks, out, *asked):
    command = [python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(JOB), what, str(out), *asked]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


KINDS = ["gpt", *(["llama"] if importlib.util.find_spec("transformers") else [])]


def one_device(kind, folder=None):
    """Losses of two steps and of two more, and the values in between; a checkpoint of them by torch where there is a folder."""
    model, optimizer = job.made(kind, None, 0)
    said = job.trained(kind, model, optimizer, slice(0, 2))
    values = {name: value.clone() for name, value in model.state_dict().items()}
    if folder is not None:
        state, its = get_state_dict(model, optimizer)
        dcp.save({"model": state, "optimizer": its}, checkpoint_id=str(folder), no_dist=True)
    return said, values, job.trained(kind, model, optimizer, slice(2, 4))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of dp 2 x tp 2, with ZeRO-3 for Llama, and one of one device; what was said before, and after they were loaded on two ranks."""
    folder = tmp_path_factory.mktemp("saved")
    alone = {kind: one_device(kind, folder / "alone" if kind == "gpt" else None) for kind in KINDS}
    before = run("save", 4, folder / "before.json", *(f"{kind}:2x2:{folder}/{kind}" for kind in KINDS))
    asked = [f"{kind}:{'1x2' if kind == 'gpt' else '2x1'}:{folder}/{kind}" for kind in KINDS]
    after = run("load", 2, folder / "after.json", *asked, f"gpt:1x2:{folder}/alone")
    return folder, alone, before, after


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_plan_saves_is_the_checkpoint_of_one_device(saved, kind):
    folder, alone, before, _ = saved
    said, values, further = alone[kind]
    assert before[kind]["said"] == pytest.approx(said, abs=1e-5)
    # By torch alone, into a model of one device that has other values.
    fresh, its = job.made(kind, None, 5)
    model, optimizer = get_state_dict(fresh, its)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=str(folder / kind), no_dist=True)
    set_state_dict(fresh, its, model_state_dict=model, optim_state_dict=optimizer)
    for name, value in fresh.state_dict().items():
        assert torch.allclose(value, values[name], atol=1e-5), name
    assert job.trained(kind, fresh, its, slice(2, 4)) == pytest.approx(further, abs=1e-5)


@pytest.mark.parametrize("of", [*KINDS, "alone"])
def test_any_mesh_loads_it_and_what_torch_saved_of_one_device(saved, of):
    _, alone, _, after = saved
    assert after[of]["said"] == pytest.approx(alone["gpt" if of == "alone" else of][2], abs=1e-5)
    assert after[of]["lr"] == [1e-3, 2e-3]


def test_a_rank_writes_its_part_and_a_replica_is_written_once(saved):
    known = dcp.FileSystemReader(str(saved[0] / "gpt")).read_metadata().state_dict_metadata
    assert sorted(list(chunk.offsets) for chunk in known["model.head.weight"].chunks) == [[0, 0], [32, 0]]
    assert len(known["model.norm.weight"].chunks) == 1
    assert len(known["optimizer.state.layers.0.attention.qkv.weight.exp_avg"].chunks) >= 2


def test_what_cannot_be_saved_or_loaded_is_one_line(tmp_path):
    model, optimizer = job.made("gpt", None, 0)
    with pytest.raises(OracleError, match="runs by no plan"):
        save(model, optimizer, tmp_path)
    alone, its = job.made("gpt", (1, 1), 0)
    with pytest.raises(OracleError, match="holds no checkpoint"):
        load(alone, its, tmp_path / "nowhere")
    dcp.save({"model": {"head.weight": torch.zeros(2, 2)}}, checkpoint_id=str(tmp_path / "other"), no_dist=True)
    with pytest.raises(OracleError, match=r"the checkpoint has no model\.|is \[2, 2\] in the checkpoint"):
        load(alone, None, tmp_path / "other")
    save(alone, None, tmp_path / "model")
    with pytest.raises(OracleError, match="the checkpoint has no optimizer of 2 parameter groups"):
        load(alone, its, tmp_path / "model")
    (tmp_path / "model" / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(OracleError, match="holds no checkpoint: "):
        load(alone, None, tmp_path / "model")
    threaded, _ = job.made("gpt", None, 0)

    def one(rank):
        save(parallelize(threaded, job.plan("gpt.toml").on(Mesh(("dp", "tp"), (1, 1)))), None, tmp_path / "t")

    with pytest.raises(OracleError, match="these ranks are threads"):
        run_threads(one, 1)


def test_one_rank_saves_and_loads_alone(tmp_path):
    model, optimizer = job.made("gpt", (1, 1), 0)
    job.trained("gpt", model, optimizer, slice(0, 2))
    save(model, optimizer, tmp_path / "one")
    again, its = job.made("gpt", (1, 1), 5)
    load(again, its, tmp_path / "one")
    assert job.trained("gpt", again, its, slice(2, 4)) == job.trained("gpt", model, optimizer, slice(2, 4))
