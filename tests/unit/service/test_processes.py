"""Processes around a job: they take no module of the user's for one of ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from proctor.verify.service import confirm, processes, supervise
from proctor.verify.service.settings import Settings


def test_a_module_beside_the_program_is_none_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def popen(command: list[str], **_: Any) -> None:
        started.append(command)

    monkeypatch.setattr(processes.subprocess, "Popen", popen)
    (tmp_path / "run").mkdir()
    processes.begin(Settings(run=str(tmp_path / "run"), job="job", packs=[]), 1, aloud=True, apart=False)
    monkeypatch.undo()
    (tmp_path / "msgspec.py").write_text("raise RuntimeError('mine')\n")
    words = started[0][: started[0].index("verify")]
    done = subprocess.run([*words, "verify", "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert words[0] == sys.executable and done.returncode == 0, done.stderr[-300:]


@pytest.mark.parametrize("module", [confirm, processes, supervise])
def test_no_process_is_started_with_the_user_s_folder_first(module: Any) -> None:
    text = Path(module.__file__).read_text()
    assert '"-m", "proctor.cli"' in text and 'sys.executable, "-m"' not in text
