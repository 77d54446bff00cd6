"""`proctor import`: one command for traces, one for rules, then check and report as for any run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.traincheck import Log, api, invariant, write

from proctor.cli import main


def test_traces_and_rules_are_checked_reported_and_learned_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = Log()
    for name in ("m.a", "m.b", "m.b"):
        log.call(name)
    trace, run, pack, rules = write(tmp_path / "t", log), tmp_path / "run", tmp_path / "pack.json", tmp_path / "rules.json"
    rules.write_text(json.dumps(invariant("FunctionCoverRelation", api("m.a"), api("m.b"))))
    assert main(["import", "traincheck", str(trace), "-o", str(run)]) == 0
    assert main(["import", "traincheck-invariants", str(rules), "-o", str(pack)]) == 0
    assert "1 rule," in capsys.readouterr().err
    assert main(["check", str(run), "-i", str(pack)]) == 1
    assert "PR152" in capsys.readouterr().out
    assert main(["report", str(run)]) == 1
    assert "m.b" in (run / "report.html").read_text()
    assert main(["infer", str(run), "-o", str(tmp_path / "ours.json"), "-q"]) in (0, 3)


@pytest.mark.parametrize(
    "words",
    [
        ["traincheck", "nothing-there", "-o", "run"],
        ["traincheck", "a", "b", "-o", "run"],
        ["traincheck-invariants", "nothing-there", "-o", "pack.json"],
        ["traincheck-invariants", "rules.json", "-o", "."],
        ["other", "x", "-o", "y"],
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["import", *words]) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith(("proctor: PR-E", "proctor import: error"))
