"""Without -i, the shipped packs that fit the run are used."""

from __future__ import annotations

import json

import pytest
from helpers.processes import BACK, ZERO
from helpers.relations import rule

from proctor.invariants import fit
from proctor.invariants.pack import Pack, write_pack


@pytest.fixture
def ship(tmp_path, monkeypatch):
    """Ship packs with these requirements."""
    folder = tmp_path / "shipped"
    folder.mkdir()
    monkeypatch.setattr(fit, "shipped", lambda: sorted(folder.glob("*.json")))

    def _ship(name, **requires):
        write_pack(Pack([rule("test_happens", first=ZERO, then=BACK)], requires=requires), folder / f"{name}.json")

    return _ship


def torch_of(run, version):
    (file,) = (run / "procs").glob("*/process.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"torch": version}))


def test_packs_that_fit_are_used_and_the_others_are_not(proctor, good, ship):
    torch_of(good, "2.7.0+cpu")
    ship("core", torch=">=2.6,<3")
    ship("hf", transformers="")
    code, out, err = proctor("check", good, "--format", "json")
    assert (code, err) == (0, "")
    (used,) = json.loads(out)["packs"]
    assert used.endswith("core.json")


def test_when_none_fits_one_line_says_why(proctor, good, ship):
    torch_of(good, "2.5.1")
    ship("core", torch=">=2.6,<3")
    ship("hf", transformers="")
    code, out, err = proctor("check", good)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    for words in ("core: it is for torch >=2.6,<3, the run used 2.5.1", "hf: the run does not use transformers", "-i"):
        assert words in err, words


def test_when_none_is_shipped_it_says_so(proctor, good, monkeypatch):
    monkeypatch.setattr(fit, "shipped", list)
    code, _, err = proctor("check", good)
    assert code == 2
    assert "ships none" in err


def test_a_named_pack_is_used_whatever_it_requires(proctor, good, ship, tmp_path):
    path = tmp_path / "mine.json"
    write_pack(Pack([rule("test_happens", first=ZERO, then=BACK)], requires={"torch": "<1"}), path)
    assert proctor("check", good, "-i", path)[0] == 0
