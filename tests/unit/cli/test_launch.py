"""The command runs, whatever breaks while Proctor prepares: it is told once, and what the user can mend is an error."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from proctor.cli import main
from proctor.errors import TraceError

COMMAND = [sys.executable, "-c", "pass"]


class Panic(BaseException):
    """What native code raises where it cannot go on."""


class BecameError(Exception):
    """Instead of replacing this process."""


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str], dict[str, str]]]:
    found: list[tuple[str, list[str], dict[str, str]]] = []

    def become(program: str, command: list[str], environment: dict[str, str]) -> None:
        found.append((program, command, environment))
        raise BecameError

    monkeypatch.setattr(os, "execvpe", become)
    monkeypatch.setattr("proctor.cli._parts.launch.hand_on_signals", lambda: None)
    return found


@pytest.mark.parametrize("error", [Panic("no\nthread"), ZeroDivisionError("own"), OSError(11, "no process")], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("how", ["record", "watch"])
def test_what_breaks_in_preparing_keeps_no_command_from_running(how, error, became, tmp_path, monkeypatch, capsys):
    def broken(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("proctor.instrument.record.rundir.create_run", broken)
    main([how, "-o", str(tmp_path / "run"), "--", *COMMAND])
    assert became == [(sys.executable, COMMAND, dict(os.environ))]
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "unwatched" in line]
    assert type(error).__name__ in line and "Traceback" not in line


@pytest.mark.parametrize("how", ["record", "watch"])
def test_what_the_user_can_mend_is_an_error(how, became, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").touch()
    assert main([how, "-o", str(tmp_path / "run"), "--", *COMMAND]) == 2
    assert not became


def test_without_a_verifier_the_command_is_recorded(became, tmp_path, monkeypatch, capsys):
    def begin(*_: object, **__: object) -> None:
        raise TraceError("the verifier was not started: no process could be made")

    monkeypatch.setattr("proctor.verify.service.processes.begin", begin)
    main(["watch", "-o", str(tmp_path / "run"), "--", *COMMAND])
    ((_, _, environment),) = became
    assert environment["PROCTOR_RUN"] == str(tmp_path / "run")
    assert f"proctor check {tmp_path / 'run'}" in capsys.readouterr().err


def test_a_panic_is_101_with_one_line(monkeypatch, capsys, tmp_path):
    def broken(*_: object, **__: object) -> int:
        raise Panic("no thread")

    monkeypatch.setattr("proctor.cli.check.run", broken)
    assert main(["check", str(tmp_path)]) == 101
    assert capsys.readouterr().err.splitlines() == ["proctor: internal error: Panic: no thread  →  PROCTOR_DEBUG=1 shows the traceback".replace("  ", " ")]


def test_a_file_that_may_not_be_executed_is_told_from_one_that_is_not_there(became, tmp_path: Path, capsys):
    script = tmp_path / "train.sh"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o644)
    assert main(["record", "-o", str(tmp_path / "run"), "--", str(script)]) == 2
    assert "may not be executed" in capsys.readouterr().err
    assert main(["record", "-o", str(tmp_path / "run"), "--", str(tmp_path / "none.sh")]) == 2
    assert "not found" in capsys.readouterr().err
    assert not became and not (tmp_path / "run").exists()


def test_rights_that_count_are_those_of_the_process(became, tmp_path, monkeypatch):
    """`shutil.which` asks for those of the real user: capabilities do not count for it."""
    script = tmp_path / "train.sh"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda name: None)
    main(["record", "-o", str(tmp_path / "run"), "--", str(script)])
    assert [program for program, _, _ in became] == [str(script)]
