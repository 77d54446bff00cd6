"""The entry point: commands found by file, documented exit codes, one line for every error."""

from __future__ import annotations

import types

import pytest

import proctor as package
from proctor import cli
from proctor.errors import TraceError


def answer(monkeypatch, act):
    """A command `try` that does `act`."""
    module = types.ModuleType("fake", "Try something.\n\nMore.")
    module.prepare = lambda parser: parser.add_argument("--n", type=int)
    module.run = lambda args: act()
    monkeypatch.setattr(cli, "commands", lambda: {"try": "fake"})
    monkeypatch.setattr(cli.importlib, "import_module", lambda name: module)


def fail(error):
    def act():
        raise error

    return act


def test_commands_are_files(proctor):
    assert {"check", "report", "explain", "pack", "doctor"} <= set(cli.commands())
    assert not any(name.startswith("_") for name in cli.commands())


def test_every_command_has_help_and_the_two_functions(proctor):
    code, out, _ = proctor("--help")
    assert code == 0
    for name in cli.commands():
        assert f"\n    {name}" in out
        code, text, _ = proctor(name, "--help")
        assert code == 0
        assert text.startswith(f"usage: proctor {name}")


def test_no_arguments_prints_help(proctor):
    assert proctor() == proctor("--help")


def test_version(proctor):
    assert proctor("--version") == (0, f"proctor {package.__version__}\n", "")


@pytest.mark.parametrize("args", [["nonsense"], ["--nonsense"], ["check", "--format", "yaml"], ["check", "--fail-on", "all"], ["explain"]])
def test_bad_usage_is_2_and_says_why_on_stderr(proctor, args):
    code, out, err = proctor(*args)
    assert (code, out) == (2, "")
    assert "usage: proctor" in err


def test_code_of_a_command_is_passed_on(proctor, monkeypatch):
    answer(monkeypatch, lambda: 3)
    assert proctor("try")[0] == 3


def test_error_of_ours_is_one_line_and_2(proctor, monkeypatch):
    answer(monkeypatch, fail(TraceError("a\nb", hint="do this")))
    assert proctor("try") == (2, "", "proctor: PR-E200 a b → do this\n")


def test_interrupt_is_130(proctor, monkeypatch):
    answer(monkeypatch, fail(KeyboardInterrupt()))
    assert proctor("try")[0] == 130


def test_unexpected_error_is_101_with_one_line(proctor, monkeypatch):
    answer(monkeypatch, fail(ZeroDivisionError("by\nzero")))
    code, out, err = proctor("try")
    assert (code, out) == (101, "")
    assert err == "proctor: internal error: ZeroDivisionError: by zero → PROCTOR_DEBUG=1 shows the traceback\n"


def test_debug_shows_the_traceback(proctor, monkeypatch):
    monkeypatch.setenv("PROCTOR_DEBUG", "1")
    answer(monkeypatch, fail(ZeroDivisionError("by zero")))
    code, _, err = proctor("try")
    assert code == 101
    assert "Traceback" in err
    assert "PROCTOR_DEBUG" not in err


def test_command_names_of_keywords_lose_their_underscore(monkeypatch):
    found = [types.SimpleNamespace(name=n) for n in ("import_", "_inputs", "two_words")]
    monkeypatch.setattr("pkgutil.iter_modules", lambda path: found)
    assert cli.commands() == {"import": "proctor.cli.import_", "two-words": "proctor.cli.two_words"}


def test_asking_for_one_command_imports_nothing_heavy(fresh):
    heavy = fresh(
        "import sys; from proctor.cli import main; main(['check', '--help']); main(['doctor', '--help'])\n"
        "print('HEAVY', [m for m in ('polars', 'pyarrow', 'rich', 'jinja2', 'torch', 'numpy') if m in sys.modules])"
    )
    assert heavy.endswith("HEAVY []\n")


def test_a_reader_that_goes_away_is_no_internal_error(tmp_path):
    import subprocess
    import sys

    done = subprocess.run(
        f"{sys.executable} -m proctor.cli --help | true; exit ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, cli.EXIT_PIPE)
    assert done.stderr == ""
