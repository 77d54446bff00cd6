"""`proctor.toml`: strict, typed, and less than the command line."""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path

import msgspec
import pytest

from proctor.cli import check, main, watch
from proctor.cli._parts import project as _project
from proctor.errors import ConfigError


def parsed(folder: Path, text: str, *words: str, command: object = watch, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    (folder / "proctor.toml").write_text(text)
    monkeypatch.chdir(folder)
    parser = argparse.ArgumentParser()
    command.prepare(parser)  # type: ignore[attr-defined]
    return parser.parse_args(words)


def test_what_init_writes_is_what_proctor_does_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = argparse.ArgumentParser()
    monkeypatch.chdir(tmp_path)
    watch.prepare(bare)
    without = vars(bare.parse_args([]))
    assert main(["init"]) == 0
    written = vars(parsed(tmp_path, Path("proctor.toml").read_text(), monkeypatch=monkeypatch))
    del written["of_project"]
    assert written == without


@pytest.mark.parametrize(
    ("words", "share"), [((), 0.01), (("--full",), 0), (("--every", "2"), 0), (("--budget", "none"), 0), (("--every", "2", "--budget", "3%"), 0.03)]
)
def test_who_says_what_is_looked_at_gets_no_other_budget(tmp_path: Path, words: tuple[str, ...], share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    assert watch.share_of_command(parsed(tmp_path, "", *words, monkeypatch=monkeypatch)) == share


def test_every_key_is_explained(tmp_path: Path) -> None:
    """Uncommented, the file has all keys of all sections, and is understood."""
    text = _project.text_of()
    lines = [line.removeprefix("# ") if line.startswith("# ") and " = " in line and line[2:3].islower() else line for line in text.splitlines()]
    table = tomllib.loads("\n".join(lines))
    for section, cls in _project._SECTIONS.items():
        assert set(table[section]) == {field.name for field in msgspec.structs.fields(cls)}
    (tmp_path / "proctor.toml").write_text("\n".join(lines))
    assert _project.read(tmp_path / "proctor.toml", "watch")["page"] == str(tmp_path / "page.toml")


def test_the_command_line_counts_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '[watch]\nbudget = "1%"\npacks = ["a.json", "b.json"]\ncapsules = false\nevery = 5\nfail_on = "error"\npage = "page.toml"\n'
    args = parsed(tmp_path, text, monkeypatch=monkeypatch)
    assert (args.budget, list(args.packs), args.no_capsules, args.every, args.fail_on, args.page) == ("1%", ["a.json", "b.json"], True, 5, "error", "page.toml")
    words = ("--budget", "none", "-i", "c.json", "--capsules", "--every", "1")
    args = parsed(tmp_path, text, *words, monkeypatch=monkeypatch)
    assert (args.budget, args.packs, args.no_capsules, args.every) == ("none", ["c.json"], False, 1)


def test_what_is_for_the_verifier_does_not_hold_on_other_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '[watch]\npage = "page.toml"\nmetrics = "9109"\nsuppressions = ["s.toml"]\n'
    args = parsed(tmp_path, text, "--metrics", "9110", monkeypatch=monkeypatch)
    _project.leave_out(args, ("page", "metrics", "suppressions", "listen"))
    assert (args.page, args.metrics, args.suppressions) == (None, "9110", [])


def test_check_has_a_section_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '[watch]\nfail_on = "never"\n[check]\nfail_on = "warning"\nbaseline = "known.json"\nsuppressions = ["s.toml"]\n'
    args = parsed(tmp_path, text, "run", command=check, monkeypatch=monkeypatch)
    assert (args.fail_on, args.baseline, list(args.suppressions)) == ("warning", "known.json", ["s.toml"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[watch]\nbugdet = '1%'", "proctor.toml:2.*bugdet.*budget"),
        ("[wach]\n", "wach.*watch"),
        ("[watch]\nbudget = 1", "proctor.toml:2.*budget"),
        ("[watch]\nbudget = '90%'", "proctor.toml:2.*budget"),
        ("[watch]\nevery = 0", "proctor.toml:2.*every"),
        ("[watch]\nfail_on = 'loud'", "proctor.toml:2.*fail_on"),
        ("[watch]\npacks = 'a.json'", "proctor.toml:2.*packs"),
        ("[check]\nfail_on = ''", "proctor.toml:2.*fail_on"),
        ("watch = 3", "watch.*not a table"),
        ("[watch", "not TOML"),
        ("a = '\x00'", "not TOML"),
    ],
)
def test_a_mistake_is_one_line_with_its_place(tmp_path: Path, text: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=said):
        parsed(tmp_path, text, monkeypatch=monkeypatch)
    assert main(["watch", "--", "true"]) == 2
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1 and "Traceback" not in error


def test_a_file_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "proctor.toml").symlink_to("/dev/zero")
    assert main(["watch", "--", "true"]) == 2


def test_init_overwrites_only_when_asked_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.toml").write_text("")
    assert main(["init"]) == 0
    assert 'page = "page.toml"' in Path("proctor.toml").read_text().splitlines()
    assert main(["init"]) == 2 and "--overwrite" in capsys.readouterr().err
    assert main(["init", "--overwrite"]) == 0
    assert main(["init", "no/such/folder/proctor.toml"]) == 2
