"""invariants/files.py: the old content or the new, and nothing beside it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from proctor.invariants.files import is_unfinished, replace_file


def test_a_file_is_replaced_and_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("mine")
    path = tmp_path / "link"
    path.symlink_to("elsewhere")
    replace_file(path, b"new", mode=0o600)
    assert not path.is_symlink() and path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (tmp_path / "elsewhere").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["elsewhere", "link"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    seen: list[str] = []

    def fail(self: Path, target: Path) -> None:
        seen.extend(os.listdir(tmp_path))
        raise OSError("no")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]
    assert any(is_unfinished(name, "file") for name in seen) and not is_unfinished("file", "file")
    monkeypatch.undo()
    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path, b"new")
