"""Ranks of one job find one run directory without talking; other jobs find another."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from proctor.errors import ProctorError, UsageError
from proctor.instrument.record.rundir import create_run, default_run

TORCHRUN = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"}


def test_ranks_of_a_job_agree_and_two_jobs_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getppid", lambda: 100)
    first = {default_run({**TORCHRUN, "RANK": str(rank)}) for rank in range(2)}
    assert len(first) == 1
    monkeypatch.setattr("os.getppid", lambda: 200)  # the same command later: torchrun's port is the same, its agent is not
    assert default_run({**TORCHRUN, "RANK": "0"}) not in first


def test_a_scheduler_s_job_is_known_on_every_node(monkeypatch: pytest.MonkeyPatch) -> None:
    node = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "1", "TORCHELASTIC_RUN_ID": "x"}
    names = set()
    for parent in (100, 200):
        monkeypatch.setattr("os.getppid", lambda parent=parent: parent)
        names.add(default_run(node))
    assert names == {Path("proctor-runs/job-77-1")}


def test_a_name_stays_one_folder_whatever_the_environment_says() -> None:
    name = default_run({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "SLURM_JOB_ID": "../../etc/x y\n" + "9" * 300})
    assert len(name.parts) == 2 and len(name.name) <= 104 and ".." not in name.parts


def test_a_single_process_has_a_run_of_its_own() -> None:
    assert default_run({}).name.startswith("2")


def test_many_ranks_make_one_run_at_the_same_moment(tmp_path: Path) -> None:
    trouble: list[Exception] = []
    gate = threading.Barrier(8)

    def rank(run: Path) -> None:
        gate.wait()
        try:
            create_run(run, ["train.py"], overwrite=False, shared=True)
            (run / "procs" / str(threading.get_ident())).mkdir(exist_ok=True)
        except (OSError, ProctorError) as error:
            trouble.append(error)

    for i in range(20):
        ranks = [threading.Thread(target=rank, args=(tmp_path / str(i),)) for _ in range(8)]
        for thread in ranks:
            thread.start()
        for thread in ranks:
            thread.join()
        assert (tmp_path / str(i) / "run.json").stat().st_size > 100
        assert {p.name for p in (tmp_path / str(i)).iterdir()} == {"run.json", "procs"}
    assert not trouble


def test_a_folder_with_other_things_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(UsageError, match="not a run directory"):
        create_run(tmp_path, ["train.py"], overwrite=False, shared=True)
