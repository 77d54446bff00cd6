"""GPT-2 of transformers, whose head is its embedding, in stages x tp in four processes on gloo: what one rank of the same plan trains."""

import json
import os
import sys
from pathlib import Path

import pytest
from helpers.oracle.jobs import parallel_staged_job as job
from helpers.ranks import run_ranks

JOB = Path(__file__).parents[2] / "helpers" / "oracle" / "jobs" / "parallel_staged_job.py"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of four processes saw."""
    pytest.importorskip("transformers")
    out = tmp_path_factory.mktemp("staged")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(JOB), str(out)]
    done = run_ranks(command, {**os.environ, "OMP_NUM_THREADS": "1"}, timeout_s=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.parametrize("case", list(job.CASES))
def test_stages_of_processes_train_what_one_rank_trains(ranks, case):
    wanted = job.trained(case, (1, 1, 1))
    for found in ranks:
        assert found[case]["said"] == pytest.approx(wanted["said"], abs=1e-5)
        assert found[case]["sums"].keys() == wanted["sums"].keys()
        for name, value in wanted["sums"].items():
            assert found[case]["sums"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
        assert found[case]["held"] < 0.6 * wanted["held"]
