"""What `make new-relation` and the like write passes lint and its own test as it is."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from scripts.new_part import PLACES, main, next_code, write  # noqa: E402

# Packages of the checkout that get a second folder, in which the new files lie.
PACKAGES = {
    "proctor.invariants.relations": "invariants/relations",
    "proctor.verify.sinks": "verify/sinks",
    "proctor.verify.report.formats": "verify/report/formats",
    "proctor.oracle.sharding": "oracle/sharding",
}
RUN = """
import importlib, sys
import pytest
for name, folder in {packages!r}.items():
    importlib.import_module(name).__path__.append(sys.argv[1] + "/" + folder)
importlib.reload(importlib.import_module("proctor.verify.report"))
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", sys.argv[1] + "/tests"]))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkout")
    for kind in PLACES:
        write(kind, f"made_{kind}", root)
    return root


def test_templates_pass_lint(made: Path) -> None:
    ruff = Path(sys.executable).with_name("ruff")
    if not ruff.exists():
        pytest.skip("ruff is not installed here")
    done = subprocess.run([ruff, "check", "--no-cache", "--config", ROOT / "pyproject.toml", made], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_their_own_tests_pass(made: Path) -> None:
    pytest.importorskip("torch")
    (made / PLACES["integration"][1].format("made_integration")).unlink()  # its program is a process that knows nothing of this folder
    command = [sys.executable, "-c", textwrap.dedent(RUN.format(packages=PACKAGES)), str(made)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT / "tests")}, cwd=made, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


def test_codes_are_not_given_twice(made: Path) -> None:
    assert int(next_code(ROOT)[2:]) > 121
    assert int(next_code(made)[2:]) == int(next_code(ROOT / "no such folder")[2:]) + 1


@pytest.mark.parametrize("name", ["class", "Monotone", "_hidden", "two words", "../out"])
def test_a_name_that_is_none_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["new_part", "sink", name, "--root", str(tmp_path)])
    assert main() == 2 and capsys.readouterr().err.count("\n") == 1


def test_what_is_there_is_not_written_over(made: Path) -> None:
    with pytest.raises(ValueError, match="exists already"):
        write("sink", "made_sink", made)
