"""The table of faults (`make faults`) and the fuzzing of readers (`make fuzz`): that they find what is wrong, and a taste of both."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.faults import outside
from benchmarks.faults.table import CLEAN, FAULTS
from benchmarks.faults.trial import Fault, UnavailableError, attempt
from benchmarks.fuzz.inputs import READERS
from benchmarks.fuzz.run import Reader, fuzz


def test_there_are_at_least_40_faults_each_with_a_name_of_its_own() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 40


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_changes_neither_the_job_nor_the_truth_and_leaves_nothing(fault: Fault, tmp_path: Path) -> None:
    try:
        outcome = attempt(fault, tmp_path / "trial")
    except UnavailableError as why:
        pytest.skip(str(why))
    finally:
        outside.tidy_up()
    assert outcome.survived, "\n".join(outcome.wrong)


@pytest.mark.slow
def test_what_is_not_survived_is_said(tmp_path: Path) -> None:
    harm = "if RUN:\n    print('say another thing', flush=True); open('mine', 'w').close(); os._exit(1)"
    outcome = attempt(Fault("harm", "Proctor does harm", CLEAN, program={"middle": harm}), tmp_path / "trial")
    assert not (outcome.bits or outcome.code or outcome.clean)


@pytest.mark.parametrize("reader", [reader.name for reader in READERS])
def test_no_broken_file_breaks_its_reader(reader: str) -> None:
    """In a process of its own: threads of libraries that other tests started do not survive the forks of fuzzing."""
    command = [sys.executable, "-m", "benchmarks.fuzz", reader, "--seed", "1000000", "--files", "8", "--minutes", "30"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0 and " 0 findings" in done.stdout, done.stdout + done.stderr[-2000:]


@pytest.mark.parametrize("how", ["raises", "dies", "grows"])
def test_fuzzing_finds_what_is_wrong(how: str, tmp_path: Path) -> None:
    def make(folder: Path) -> list[Path]:
        (folder / "file").write_bytes(b"sound" * 20)
        return [folder / "file"]

    held: list[bytearray] = []

    def read(folder: Path) -> None:
        if (folder / "file").read_bytes() == b"sound" * 20:
            return
        if how == "raises":
            raise KeyError("lost")
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        held.append(bytearray(b"x" * (64 << 20)))

    found = fuzz(Reader("bad", make, read), tmp_path / "fuzz", seconds=3600, most=10)
    said = {"raises": "KeyError", "dies": "signal 9", "grows": "memory grew"}[how]
    assert any(said in text for text in found.wrong.values()), found
