"""Which recordings shipped packs are made from: public programs of the first half that have no bug of their own, by the library that they use."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
import make_packs
import pack_members
from pack_members import Member

from benchmarks.wild.manifest import Program, Project
from proctor.invariants.invariant import Invariant, Tier
from proctor.invariants.pack import Pack, read_pack, shipped
from proctor.invariants.relations import registry

LIBRARIES = ("peft", "transformers")


def recorded(run: Path, *processes: dict[str, str]) -> None:
    for rank, libraries in enumerate(processes or ({},)):
        folder = run / "procs" / str(rank)
        folder.mkdir(parents=True)
        (folder / "process.json").write_text(json.dumps({"torch": "2.13.0", "libraries": libraries}))
    run.with_suffix(run.suffix + ".done").write_text("0")


def project(half: str, name: str, *programs: dict[str, str]) -> Project:
    made = tuple(Program(project=name, half=half, trains="", **told) for told in programs)
    return Project(name=name, repository="", commit="", licence="", half=half, programs=made)


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    projects = [
        project("first", "a+a", {"path": "one.py"}, {"path": "wrong.py", "bug": "clips before its backward"}, {"path": "two.py"}, {"path": "three.py"}),
        project("second", "b+b", {"path": "held.py"}),
        project("first", "c+c", {"path": "away.py"}),
    ]
    monkeypatch.setattr(pack_members, "read_corpus", lambda: projects)
    for name in ("a+a", "b+b"):
        (tmp_path / "checkouts" / name).mkdir(parents=True)
    for name in ("a+a--one", "a+a--wrong", "a+a--two", "a+a--three", "b+b--held", "c+c--away"):
        recorded(tmp_path / f"{name}-seed0")
    recorded(tmp_path / "a+a--one-batch")
    return tmp_path


def test_no_program_of_the_held_half_and_none_with_a_bug_of_its_own_teaches(corpus: Path) -> None:
    found = pack_members.public(corpus, corpus / "checkouts", 9, LIBRARIES, record=False)
    assert [m.name for m in found] == ["a+a--one", "a+a--two", "a+a--three"]
    assert [list(m.runs) for m in found] == [["seed0", "batch"], ["seed0"], ["seed0"]]


def test_no_project_teaches_more_than_so_many_programs(corpus: Path) -> None:
    assert len(pack_members.public(corpus, corpus / "checkouts", 2, LIBRARIES, record=False)) == 2


def test_what_did_not_end_well_teaches_nothing(corpus: Path) -> None:
    (corpus / "a+a--one-seed0.done").write_text("1")
    assert "a+a--one" not in [m.name for m in pack_members.public(corpus, corpus / "checkouts", 9, LIBRARIES, record=False)]


@pytest.mark.parametrize(
    ("processes", "area"),
    [([{}], "torch"), ([{}, {}], "distributed"), ([{"transformers": "5.0"}, {"transformers": "5.0"}], "transformers"), ([{"transformers": "5.0", "peft": "0.17"}], "peft")],
)
def test_a_program_teaches_the_pack_of_its_topmost_library(tmp_path: Path, processes: list[dict[str, str]], area: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(tmp_path / "run", *processes)
    monkeypatch.setattr(pack_members.Trace, "load", lambda runs: SimpleNamespace(functions=["torch.add", "peft.get_peft_model"]))
    assert pack_members.area([tmp_path / "run"], LIBRARIES) == area


def test_a_library_that_another_one_imports_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(tmp_path / "run", {"transformers": "5.0", "peft": "0.17"})
    monkeypatch.setattr(pack_members.Trace, "load", lambda runs: SimpleNamespace(functions=["torch.add", "transformers.Trainer.train"]))
    assert pack_members.area([tmp_path / "run"], LIBRARIES) == "transformers"


@pytest.mark.parametrize(("area", "families"), [("peft", ["usage"]), ("deepspeed-fold1", ["usage"]), ("torch", []), ("transformers", [])])
def test_a_new_pack_of_a_library_says_how_the_library_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, area: str, families: list[str]) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(make_packs, "run", lambda command, **options: ran.append(command) or SimpleNamespace(returncode=0))
    monkeypatch.setattr(make_packs, "read_pack", lambda path: Pack([]))
    make_packs.learn(tmp_path, area, [], 1)
    assert [after for word, after in itertools.pairwise(ran[0]) if word == "--relations"] == families


def test_programs_of_one_project_are_held_out_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    learned = []
    monkeypatch.setattr(make_packs, "learn", lambda work, name, members, fewest: learned.append({m.name for m in members}) or Pack([]))
    members = [Member(f"{name}{i}", "torch", {}, project=name) for name in "ab" for i in range(2)] + [Member("own", "torch", {})]
    make_packs.held_out(tmp_path, "torch", members, 3, 1)
    assert learned == [{"b0", "b1", "own"}, {"a0", "a1", "own"}, {"a0", "a1", "b0", "b1"}]


def shipped_rules() -> list[tuple[str, Invariant]]:
    return [(path.stem, rule) for path in shipped() for rule in read_pack(path).invariants]


def test_a_shipped_rule_that_pages_carries_its_figure() -> None:
    pages = [(pack, rule) for pack, rule in shipped_rules() if registry()[rule.relation].tier(rule) is Tier.PAGE]
    assert pages
    for pack, rule in pages:
        measured = rule.record if rule.record is not None else rule.false_alarm
        assert measured is not None, (pack, rule.text)
        assert measured.tested > 0, (pack, rule.text)
        assert measured.failed == 0, (pack, rule.text)


def test_a_shipped_pack_carries_its_figure() -> None:
    assert {path.stem for path in shipped() if read_pack(path).provenance.measured is None} <= make_packs.UNMEASURED
