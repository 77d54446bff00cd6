from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.runs import write_run
from infer_fakes import Broken, OnlyCalls

from proctor.cli import main
from proctor.invariants import relations
from proctor.invariants.pack import read_pack
from proctor.invariants.relations import Relation


class Only(OnlyCalls):
    def examples(self, trace, hypotheses):  # type: ignore[no-untyped-def]
        import polars as pl

        from proctor.invariants.relations import Examples

        calls = trace.calls.join(trace.contexts.select("ctx", "phase"), on="ctx")
        one = calls.select(
            pl.lit(0, dtype=pl.UInt32).alias("hyp"), pl.lit(value=True).alias("passed"), "proc", "phase"
        )
        return Examples(one, ("phase",), ("phase",))


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Relation] = {"broken": Broken(), "only": Only()}
    monkeypatch.setattr(relations, "registry", lambda: found)


@pytest.fixture
def healthy(tmp_path: Path) -> Path:
    calls = [{"fn": "step", "step": n, "phase": "train"} for n in range(5)]
    return write_run(tmp_path / "healthy", [{"calls": calls}, {"calls": calls}], program="train.py")


def test_a_pack_is_written_and_the_next_command_named(
    healthy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack = tmp_path / "new" / "rules.json"
    assert main(["infer", str(healthy), "-o", str(pack), "--relations", "only"]) == 0
    (rule,) = read_pack(pack).invariants
    assert rule.support.passed == 10
    out, err = capsys.readouterr()
    assert rule.text in out and "phase is train" in out and rule.id in out
    assert "no passing example" in out  # the hypothesis that was dropped
    assert f"proctor check RUN -i {pack}" in out
    assert err.splitlines() == [
        "reading runs: 1",
        "collecting examples: 1",
        "finding preconditions: 1",
        "learned from 1 run, 1 program, 2 processes: 10 calls, 0 states",
    ]


def test_provenance_says_what_was_learned_from(healthy: Path, tmp_path: Path) -> None:
    (facts,) = (healthy / "procs").glob("0-*/process.json")
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {"torch": "2.6.0"}))
    pack = tmp_path / "rules.json"
    main(["infer", str(healthy), str(healthy), "-o", str(pack), "-q"])
    source = read_pack(pack).provenance
    assert (source.runs, source.records, source.torch, source.programs) == (1, 10, "2.6.0", ["train.py"])
    assert source.tool.startswith("proctor ")


def test_quiet_says_only_errors(healthy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["infer", str(healthy), "-o", str(tmp_path / "rules.json"), "-q"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "proctor: relation broken failed, its rules are missing: ZeroDivisionError: first line"
    ]


def test_unknown_relation_lists_those_known(
    healthy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["infer", str(healthy), "-o", str(tmp_path / "p.json"), "--relations", "only,nothing"]) == 2
    assert "unknown relation nothing; known are broken, only" in capsys.readouterr().err


@pytest.mark.parametrize("jobs", ["0", "-2", "many"])
def test_jobs_is_a_positive_number(healthy: Path, tmp_path: Path, jobs: str) -> None:
    assert main(["infer", str(healthy), "-o", str(tmp_path / "p.json"), "--jobs", jobs]) == 2


def test_a_directory_is_not_overwritten_by_a_pack(healthy: Path, tmp_path: Path) -> None:
    assert main(["infer", str(healthy), "-o", str(tmp_path)]) == 2


def test_no_such_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["infer", str(tmp_path / "gone"), "-o", str(tmp_path / "p.json")]) == 2
    assert "no such directory" in capsys.readouterr().err


def test_a_run_without_records_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = write_run(tmp_path / "empty", [{}])
    assert main(["infer", str(empty), "-o", str(tmp_path / "p.json")]) == 2
    assert "nothing was recorded" in capsys.readouterr().err


def test_nothing_learned_is_inconclusive_and_writes_no_pack(
    healthy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack = tmp_path / "p.json"
    assert main(["infer", str(healthy), "-o", str(pack), "--relations", "broken"]) == 3
    assert not pack.exists()
    assert "no pack was written" in capsys.readouterr().out
