"""Inference on a real cluster of two worker processes gives what one process gives."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.loops import loop
from helpers.runs import write_run

from proctor.cli import main
from proctor.infer import shards
from proctor.infer.engine import infer
from proctor.invariants.pack import read_pack
from proctor.invariants.relations import registry

distributed = pytest.importorskip("dask.distributed")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as made:
        yield made


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [
        write_run(tmp_path / f"run{i}", [loop(steps=6 + i), loop(steps=6 + i)], program=f"train{i % 3}.py") for i in range(5)
    ]


def test_cluster_gives_the_rules_of_one_process(cluster: Any, runs: list[Path]) -> None:
    from proctor.infer.executors.dask_ import DaskExecutor

    relations = list(registry().values())
    alone, _ = infer(shards.of_runs(runs), relations, strict=True)
    executor = DaskExecutor(cluster.scheduler_address)
    try:
        assert executor.workers == 2
        together, report = infer(shards.of_runs(runs), relations, executor=executor, strict=True)
    finally:
        executor.close()
    assert alone and together == alone
    assert len(report.runs) == 5 and not report.errors


def work(item: int) -> int:
    if item == 3:
        raise ValueError("three")
    return os.getpid()


def test_both_workers_work_and_errors_come_back(cluster: Any) -> None:
    from proctor.infer.executors.dask_ import DaskExecutor

    executor = DaskExecutor(cluster.scheduler_address)
    try:
        pids = dict(executor.map(work, [0, 1, 2, 10, 11, 12], list("abcdef")))
        assert len(set(pids.values())) == 2 and os.getpid() not in pids.values()
        with pytest.raises(ValueError, match="three"):
            list(executor.map(work, [3], ["x"]))
    finally:
        executor.close()


def test_workers_are_counted_while_the_client_has_no_list_of_them(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from proctor.infer.executors.dask_ import DaskExecutor

    executor = DaskExecutor(cluster.scheduler_address)
    try:
        monkeypatch.setattr(distributed.Client, "scheduler_info", lambda self, n_workers=5: {"workers": {}})  # as it is while the client looks
        assert executor.workers == 2
    finally:
        executor.close()


def test_command_works_on_a_scheduler(cluster: Any, runs: list[Path], tmp_path: Path) -> None:
    pack, other = tmp_path / "a.json", tmp_path / "b.json"
    args = [*map(str, runs), "-q"]
    assert main(["infer", *args, "-o", str(pack), "--executor", "dask", "--scheduler", cluster.scheduler_address]) == 0
    assert main(["infer", *args, "-o", str(other)]) == 0
    assert read_pack(pack).invariants == read_pack(other).invariants


def test_no_scheduler_is_one_line(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from proctor.infer.executors import dask_

    dask_._CONNECT_S, before = 1, dask_._CONNECT_S
    try:
        args = ["infer", str(runs[0]), "-o", str(tmp_path / "p.json"), "--executor", "dask", "--scheduler", "tcp://127.0.0.1:9"]
        assert main(args) == 2
    finally:
        dask_._CONNECT_S = before
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("proctor:")]
    assert "--scheduler tcp://127.0.0.1:9" in line
