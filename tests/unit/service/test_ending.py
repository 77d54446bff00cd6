"""The end of a watch: there is a verdict whatever else goes wrong, and what it could not say is not called clean."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from helpers.loops import loop
from helpers.runs import write_run

from proctor.infer.engine import infer
from proctor.invariants.pack import Pack
from proctor.invariants.relations import registry
from proctor.invariants.trace import Trace
from proctor.invariants.verdict import CheckResult
from proctor.verify import wording
from proctor.verify.checker import check
from proctor.verify.service import ending
from proctor.verify.service.settings import Settings, Verdict
from proctor.verify.service.verifier import Summary, Verifier

KNOWN = {name: registry()[name] for name in ("contain", "sequence")}
FAULT = {8: ["backward"]}


@dataclass
class Job:
    pack_names: list[str] = field(default_factory=lambda: ["mine"])


@dataclass
class Done:
    """A verifier that has ended."""

    undelivered: bool = False
    job: Job = field(default_factory=Job)


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    folder = tmp_path_factory.mktemp("healthy")
    paths = [write_run(folder / f"run{i}", [loop(steps=12)]) for i in range(2)]
    return Pack(infer(Trace.load(paths), list(KNOWN.values()), strict=True)[0])


@pytest.fixture
def ended(tmp_path: Path, pack: Pack, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Verdict | None, str]]:
    """End the watch of a job; its exit code, the verdict that is written, and what is said."""

    def end(*, faulty: bool = False, fail_on: str = "error", undelivered: bool = False, page: str = "", summary: Summary | None = None) -> tuple[int, Verdict | None, str]:
        run = write_run(tmp_path / "run", [loop(steps=12, skip=FAULT) if faulty else loop(steps=12)])
        (run / "verify").mkdir()
        if summary is None:
            trace = Trace.load([run])
            result = check(trace, [pack], relations=KNOWN)
            summary = Summary(result.violations, judged=11, lost={}, result=result, trace=trace)
        settings = Settings(run=str(run), job="job", packs=[], fail_on=fail_on, page=page)
        code = ending.conclude(settings, summary, cast(Verifier, Done(undelivered)))
        return code, settings.verdict(), capsys.readouterr().err

    return end


def test_a_clean_run_has_a_report_and_ends_with_0(ended: Callable[..., Any], tmp_path: Path) -> None:
    code, verdict, said = ended()
    assert code == wording.EXIT_CLEAN and verdict is not None and verdict.violations == 0 and verdict.steps == 12 and not verdict.unsure
    assert "watched 12 steps: no violation; report in" in said and (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize(("fail_on", "code"), [("warning", wording.EXIT_VIOLATED), ("never", wording.EXIT_CLEAN)])
def test_a_violation_fails_where_it_was_asked_to(ended: Callable[..., Any], fail_on: str, code: int) -> None:
    found, verdict, said = ended(faulty=True, fail_on=fail_on)
    assert found == code and verdict is not None and verdict.violations > 0 and verdict.worst is not None
    assert f"{verdict.violations} rule" in said and "violated" in said


def test_a_report_that_cannot_be_made_is_said_and_there_is_a_verdict(ended: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(ending, "read_beside", broken)
    code, verdict, said = ended()
    assert code == wording.EXIT_CLEAN and verdict is not None and verdict.steps == 12
    assert "the report was not written: RuntimeError: no room" in said and "proctor report" in said


def test_a_verdict_that_cannot_be_written_is_said(ended: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Settings, "give", full)
    code, verdict, said = ended()
    assert code == wording.EXIT_CLEAN and verdict is None and "the verdict was not written: No space left on device" in said


def test_where_nothing_was_judged_it_is_not_clean(ended: Callable[..., Any]) -> None:
    code, verdict, said = ended(summary=Summary([], judged=-1, lost={}))
    assert code == wording.EXIT_INCONCLUSIVE and verdict is not None and verdict.steps == 0 and "watched" not in said


def test_rules_that_are_all_unknown_are_not_clean(ended: Callable[..., Any]) -> None:
    live = CheckResult(run="", incidents=[], checked=0, not_triggered=0, unknown=3, notes=[], steps=6, ranks=1)
    _, verdict, said = ended(summary=Summary([], judged=5, lost={}, live=live))
    assert verdict is not None and verdict.unsure and "not clean, but unknown" in said


@pytest.mark.parametrize(("pid", "expected"), [(4711, "process 4711 tries for another 5 min"), (0, "they wait in the outbox  →  proctor page flush --run")])
def test_who_delivers_the_rest_is_said(ended: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pid: int, expected: str) -> None:
    asked: list[float] = []

    def later(_: Settings, limit_s: float) -> int:
        asked.append(limit_s)
        return pid

    monkeypatch.setattr(ending, "deliver_later", later)
    (tmp_path / "page.toml").write_text("[job]\ndeliver_s = 300\n")
    _, verdict, said = ended(undelivered=True, page=str(tmp_path / "page.toml"))
    assert verdict is not None and verdict.delivering == pid and expected in said and asked == [300.0]


def test_a_configuration_that_is_gone_by_then_is_no_end_without_a_verdict(ended: Callable[..., Any], tmp_path: Path) -> None:
    _, verdict, said = ended(undelivered=True, page=str(tmp_path / "gone.toml"))
    assert verdict is not None and verdict.delivering == 0 and "proctor page flush" in said and os.fspath(tmp_path) in said
