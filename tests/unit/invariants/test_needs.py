"""What packs need is remembered under their content, and never believed when it is not what it should be."""

from __future__ import annotations

from pathlib import Path

import pytest

from proctor.cli._parts import needs
from proctor.errors import PackError
from proctor.invariants.pack import shipped

TORCH = [path for path in shipped() if path.stem in ("accelerate", "torch")]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "proctor"


def only(folder: Path) -> Path:
    (found,) = folder.iterdir()
    return found


def test_what_is_remembered_is_what_the_rules_say(kept: Path) -> None:
    packs = TORCH
    assert needs.known(packs) is None
    asked = needs.needs_of(packs)
    assert any(asked.values()) and needs.known(packs) == asked == needs.needs_of(packs)
    assert only(kept).stat().st_mode & 0o777 == 0o600


def test_other_bytes_are_another_pack(kept: Path, tmp_path: Path) -> None:
    pack = tmp_path / "pack.json"
    pack.write_bytes(TORCH[-1].read_bytes())
    needs.needs_of([pack])
    pack.write_bytes(pack.read_bytes() + b"\n")
    assert needs.known([pack]) is None
    pack.write_text("{")
    with pytest.raises(PackError):
        needs.needs_of([pack])
    assert needs.known([pack]) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"form":1,"key":"x","functions":["a"],"states":[],"values":[]}', b'{"form":1,"key":1}'])
def test_a_file_that_is_not_what_it_should_be_is_as_none(kept: Path, content: bytes) -> None:
    packs = TORCH
    asked = needs.needs_of(packs)
    only(kept).write_bytes(content)
    assert needs.known(packs) is None and needs.needs_of(packs) == asked


def test_a_pack_with_rules_of_unknown_relations_is_read_each_time(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proctor.invariants.relations.registry", dict)
    assert not any(needs.needs_of(TORCH).values()) and needs.known(TORCH) is None


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert needs.needs_of(TORCH)["values"]
