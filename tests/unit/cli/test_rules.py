"""`proctor explain`, `proctor pack`, `proctor doctor`."""

from __future__ import annotations

import json

import pytest
from helpers.relations import ALL, rule

from proctor.invariants.condition import Condition, Kind, Precondition
from proctor.invariants.pack import Pack, write_pack


def test_explain_a_rule_by_the_beginning_of_its_id(proctor, pack, happens):
    code, out, _ = proctor("explain", happens.id[:6], "-i", pack)
    assert code == 0
    for words in (happens.text, "always", "held in 120 examples of 3 runs, 2 programs", happens.id, "PR190 test_happens"):
        assert words in out


def test_explain_a_code_or_a_family(proctor):
    code, out, _ = proctor("explain", "PR191")
    assert code == 0
    assert out.startswith("PR191 test_finite (critical)\n\nRelations simple enough")
    assert proctor("explain", "pr191")[1] == out == proctor("explain", "test_finite")[1]


def test_explain_an_error(proctor):
    code, out, _ = proctor("explain", "PR-E300")
    assert code == 0
    assert "pack file is missing" in out


@pytest.mark.parametrize("what", ["PR999", "PR-E999", "zzz", ""])
def test_explain_something_unknown_is_2(proctor, pack, what, tmp_path):
    two = tmp_path / "two.json"
    write_pack(Pack([rule("test_finite", variable=v) for v in "abc"]), two)
    code, out, err = proctor("explain", what, "-i", two)
    assert (code, out) == (2, "")
    assert err.startswith("proctor: PR-E100")


def test_pack_show_groups_rules_by_family_and_bounds_them(proctor, tmp_path):
    path = tmp_path / "p.json"
    when = Precondition(((Condition("phase", Kind.CONSTANT, "train"),),))
    write_pack(Pack([rule("test_finite", when, variable=f"w{i}") for i in range(60)] + [rule("test_broken")]), path)
    code, out, _ = proctor("pack", "show", path)
    assert code == 0
    assert "61 rules" in out
    assert "when phase is train; held in 120 examples" in out
    assert "+11 more: --all" in out
    assert "more: --all" not in proctor("pack", "show", path, "--all")[1]
    assert "is finite" not in proctor("pack", "show", path, "--relation", "test_broken")[1]


def test_pack_list(proctor, pack):
    code, out, _ = proctor("pack", "list", pack)
    assert code == 0
    assert "1 rule from 3 runs, 2 programs: test_happens 1" in out
    assert proctor("pack", "list")[0] == 0


def test_pack_lint_of_a_good_pack_is_0(proctor, pack):
    code, out, _ = proctor("pack", "lint", pack)
    assert code == 0
    assert "no problem" in out


def test_pack_lint_names_every_problem(proctor, pack):
    tree = json.loads(pack.read_text())
    (sound,) = tree["invariants"]
    tree["invariants"] = [
        sound,
        sound | {"text": " "},
        sound | {"id": "edited"},
        sound | {"hypothesis": {"relation": "nonesuch", "params": []}},
        sound | {"hypothesis": {"relation": "test_happens", "params": []}},
        sound | {"precondition": {"any_of": []}},
        sound | {"support": sound["support"] | {"passed": 0}},
    ]
    bad = pack.with_name("bad.json")
    bad.write_text(json.dumps(tree))
    code, out, _ = proctor("pack", "lint", bad)
    assert code == 1
    for words in ("occurs 6 times", "$.invariants[1]", "no text", "edited by hand", "unknown relation 'nonesuch'", "do not fit", "never applies", "no example supports"):
        assert words in out, words


def test_pack_lint_of_an_empty_pack_is_1(proctor, tmp_path):
    write_pack(Pack([]), tmp_path / "p.json")
    assert proctor("pack", "lint", tmp_path / "p.json")[0] == 1


def test_pack_that_cannot_be_read_is_2(proctor, tmp_path):
    for action in ("list", "show", "lint"):
        assert proctor("pack", action, tmp_path / "no.json")[0] == 2
    assert proctor("pack")[0] == 2


def test_doctor_looks_at_everything_and_never_raises(proctor, monkeypatch):
    code, out, _ = proctor("doctor")
    assert code in (0, 1)
    for words in ("python", "polars", "native", "torch", f"{len(ALL)}: ", "python -I", "folder"):
        assert words in out, words


def test_doctor_turns_a_broken_part_into_a_finding(proctor, monkeypatch):
    from proctor.cli import doctor

    def _relations():
        raise ImportError("no\nsuch thing")
        yield

    monkeypatch.setattr(doctor, "_rules", _relations)
    code, out, _ = proctor("doctor")
    assert code == 1
    assert "FAIL  relations   ImportError: no such thing" in out
