"""Bad input to `proctor oracle self`: one line, exit code 2."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers.warm import python

pytest.importorskip("torch")

from proctor.cli import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no command"),
        (["--", "no-such-program-here"], "command not found"),
        (["--only", "nothing", "--", sys.executable], "no such relation"),
        (["--step", "-1", "--", sys.executable], "--step"),
        (["--budget", "0", "--", sys.executable], "--budget"),
        (["--vary", "--a '", "--b", "--", sys.executable], "--vary"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_one_line(arguments, said, capsys):
    code = main(["oracle", "self", *arguments])
    told = capsys.readouterr().err
    assert code == 2 and said in told and "Traceback" not in told


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path, capsys):
    (tmp_path / "mine").write_text("x")
    assert main(["oracle", "self", "-o", str(tmp_path), "--", python(), "-c", "pass"]) == 2
    assert "not empty" in capsys.readouterr().err and (tmp_path / "mine").read_text() == "x"


@pytest.mark.parametrize(
    ("program", "said"),
    [("pass", "without training"), ("raise SystemExit(7)", "code 7"), ("import torch; raise ValueError('seven apples')", "seven apples")],
)
def test_a_program_that_trains_nothing_is_one_line(program, said, tmp_path: Path, capsys):
    assert main(["oracle", "self", "-o", str(tmp_path / "out"), "--", python(), "-c", program]) == 2
    told = capsys.readouterr().err
    assert said in told and "Traceback" not in told


def test_a_command_that_takes_too_long_is_ended(tmp_path: Path, capsys):
    assert main(["oracle", "self", "--timeout", "1", "-o", str(tmp_path / "out"), "--", python(), "-c", "import time; time.sleep(600)"]) == 2
    assert "within 1 s" in capsys.readouterr().err
