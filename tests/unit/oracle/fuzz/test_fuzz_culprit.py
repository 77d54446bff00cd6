"""What the oracle says of a finding's programs: in a sentence, written down once, and asked of inconsistencies alone."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from proctor.oracle.fuzz.running.judge import Difference
from proctor.oracle.fuzz.running.outcome import Outcome, Symptom
from proctor.oracle.fuzz.search.findings import Finding
from proctor.oracle.fuzz.sessions import culprit
from proctor.oracle.fuzz.sessions.journal import Asked, Journal
from proctor.oracle.fuzz.sessions.script import script_of
from proctor.oracle.fuzz.space import Point
from proctor.oracle.fuzz.spec import Scenario

WRONG = Difference(0, "parameter", "layers.0.bias", 0.1, 1e-9, 1.0)
ADAFACTOR: Point = {"world": 2, "wrapper": "fsdp2", "optimizer": "Adafactor"}


def a_finding(id_: str, setting: Point, first: Difference | None = WRONG, **more: Any) -> Finding:
    scenario = Scenario("chain", {"layers": ["layernorm"], "width": 4}, {"batch": 4, "steps": 1}, setting)
    return Finding(id_, scenario, Outcome("inconsistent", Symptom("inconsistent", "parameter"), "differs", first), setting, (), scenario, **more)


@pytest.mark.parametrize(
    ("report", "said"),
    [
        ({"verdict": "different", "reason": "2 of 9 differ", "culprit": {"module": "layers.0", "direction": "update", "operation": "aten.norm", "source": "", "text": "the update is half"}},
         "the oracle: layers.0 (update) aten.norm: the update is half"),
        ({"verdict": "different", "reason": "2 of 9 differ", "culprit": {"module": "", "direction": "gradient", "operation": "", "source": "a.py:3", "text": "all wrong"}},
         "the oracle: the whole model (gradient) a.py:3: all wrong"),
        ({"verdict": "different", "reason": "2 of 9 differ", "culprit": None, "first": {"kind": "param_after", "name": "w", "class": "Linear", "note": "half"}},
         "the oracle: 2 of 9 differ, first in param_after w (Linear): half"),
        ({"verdict": "different", "reason": "2 of 9 differ"}, "the oracle: 2 of 9 differ"),
        ({"verdict": "equivalent", "reason": "all 9 agree"}, "the oracle finds them equivalent: all 9 agree"),
    ],
)  # fmt: skip
def test_a_report_is_a_sentence(report: dict[str, Any], said: str) -> None:
    assert culprit.sentence(report) == said


def test_each_new_confirmed_inconsistency_is_asked_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path)
    journal.begin(Asked(0, ("torch",), 16, 1, {"torch": "2.13"}))
    for finding in (
        a_finding("00000001", ADAFACTOR, confirmed="yes"), a_finding("00000002", ADAFACTOR, confirmed="no"), a_finding("00000003", ADAFACTOR, confirmed="yes", known="it"),
        a_finding("00000004", ADAFACTOR, None, confirmed="yes"), a_finding("00000005", {**ADAFACTOR, "disk": "save"}, confirmed="yes"),
    ):  # fmt: skip
        journal.put(finding, script_of(finding, "2.13") if finding.outcome.first else "", "")
    begun: list[list[str]] = []

    class Answering:
        """A command that prints a report."""

        pid, args = 0, ()

        def __init__(self, words: list[str], **_: Any) -> None:
            begun.append(words)

        def __enter__(self) -> Answering:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def communicate(self, timeout: float) -> tuple[bytes, bytes]:
            return (b'{"verdict": "different", "reason": "it is", "culprit": null, "first": null}', b"") if len(begun) == 1 else (b"", b"proctor: PR-E1 no\n")

    monkeypatch.setattr(culprit.subprocess, "Popen", Answering)
    told: list[str] = []
    culprit.locate(journal, told.append)
    culprit.locate(journal, told.append)
    assert told == ["00000001: the oracle: it is"] and len(begun) == 1
    assert begun[0][begun[0].index("--steps") + 1] == "1" and "programs.py::candidate" in " ".join(begun[0])
    assert [f.culprit for f in journal.findings()] == ["the oracle: it is", "", "", "", ""]
    failing = a_finding("00000001", ADAFACTOR)
    monkeypatch.chdir(tmp_path)
    culprit.culprit_of(failing, Path("findings/00000001/script.py"))  # a campaign's directory may be a relative one
    assert Path(begun[-1][begun[-1].index("--html") + 1]).is_absolute()
    assert culprit.culprit_of(a_finding("00000006", {"wrapper": "deepspeed", "ds_stage": 1, "ds_state": "fp32"}), tmp_path / "script.py") == "" and len(begun) == 2
    for wrapper in ("fsdp1", "dmp", "pipeline"):  # their parameters have other names there: in flat tensors, kernels, stages
        assert culprit.culprit_of(a_finding("00000007", {"world": 2, "wrapper": wrapper}), tmp_path / "script.py") == "" and len(begun) == 2
    assert culprit.culprit_of(failing, tmp_path / "findings" / "00000001" / "script.py") == "the oracle says nothing: proctor: PR-E1 no"


def test_an_oracle_that_is_ended_takes_its_recordings_with_it() -> None:
    """They have sessions of their own: one went on after its campaign, and wrote into a folder that was gone."""
    inner = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); print(p.pid, flush=True); p.wait()"
    outer = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {inner!r}], start_new_session=True).wait()"
    with subprocess.Popen([sys.executable, "-c", outer], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        last = int(process.stdout.readline())
        assert Path(f"/proc/{last}").exists()
        culprit.ended(process)
    end = time.monotonic() + 20
    while Path(f"/proc/{last}").exists() and "State:\tZ" not in Path(f"/proc/{last}/status").read_text() and time.monotonic() < end:
        time.sleep(0.05)
    assert time.monotonic() < end


@pytest.mark.slow  # eight short runs of two programs
def test_the_oracle_names_the_update_of_a_real_finding(tmp_path: Path) -> None:
    """Adafactor of vectors under FSDP2 (torch 2.13): each rank takes the norm of its own part."""
    finding = a_finding("00000001", ADAFACTOR, confirmed="yes")
    (tmp_path / "script.py").write_text(script_of(finding, "2.13"))
    assert "(update)" in culprit.culprit_of(finding, tmp_path / "script.py")
    assert (tmp_path / "oracle.html").exists()
