"""Bookkeeping of the matrix: what counts, what is kept, what is in the table. Nothing trains here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from benchmarks.mutants import judge, runner
from benchmarks.mutants import programs as sources
from benchmarks.mutants.programs import HERE, Program, prepare, read
from benchmarks.mutants.registry import Operator, load
from benchmarks.mutants.table import render
from benchmarks.wild import manifest

SOURCE = """
def train(model, opt, data):
    for x in data:
        opt.zero_grad()
        loss = model(x)
        loss.backward()
        opt.step()
"""


class FakeRuns:
    """Writes digests as the start-up hook does; a source without `zero_grad` computes something else from step 1 on."""

    def __init__(self) -> None:
        self.commands: list[tuple[str, int, str, bool]] = []
        self.crash = ""

    def run(
        self, program: Program, folder: Path, seed: int, *, digest: Path | None = None, operator: str = "", record: Path | None = None
    ) -> tuple[int, str]:
        text = (folder / program.script).read_text()
        self.commands.append((program.name, seed, operator, record is not None))
        if self.crash and self.crash not in text:
            return 1, "it broke"
        if digest is not None:
            digest.mkdir(parents=True, exist_ok=True)
            other = 2 if "zero_grad" not in text or operator else 1
            events = [[0, "loss", 1], [0, "parameters", 1], [1, "loss", other]]
            (digest / "0-1.json").write_text(json.dumps({"rank": 0, "fired": 1 if operator else -1, "events": events}))
        return 0, ""


@pytest.fixture
def checkouts(tmp_path: Path) -> Path:
    for owner in ("a", "b", "c"):
        folder = tmp_path / "checkouts" / f"{owner}+lab"
        folder.mkdir(parents=True)
        (folder / "main.py").write_text(SOURCE)
    return tmp_path / "checkouts"


def programs(*names: str) -> list[Program]:
    return [Program(name, f"{name}/lab", ".", "main.py", []) for name in names]


def violation(**changes: Any) -> dict[str, Any]:
    base = {"id": "r1", "relation": "sequence", "severity": "error", "step": 1, "source": "", "text": "", "function": "", "advice": "",
            "variable": "", "module": "", "expected": "", "seen": ""}
    return {**base, **changes}


def matrix(tmp_path: Path, checkouts: Path, runs: FakeRuns, operators: dict[str, Operator], **options: Any) -> runner.Matrix:
    return runner.Matrix(programs("a", "b", "c"), operators, checkouts, tmp_path / "work", runs, **options)


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, Any]]]:
    """`check` and `infer` without Proctor: mutants get one error, clean runs none."""
    answers = [[violation(text="opt.zero_grad is called between updates")]]
    monkeypatch.setattr(runner, "check", lambda run, pack: answers[0] if "recordings" in run.parts else [])
    monkeypatch.setattr(runner, "infer", lambda runs, pack: pack.write_text("{}"))
    return answers


def test_a_mutant_that_counts_is_judged_by_three_sources(tmp_path: Path, checkouts: Path, judged: Any) -> None:
    operators = {"zero_grad_left_out": load()["zero_grad_left_out"]}
    results = matrix(tmp_path, checkouts, FakeRuns(), operators).run(9, 0)
    assert [r["program"] for r in results] and {r["state"] for r in results} == {"counts"} and len(results) == 3
    assert results[0]["trigger"] == 1 and results[0]["effect"] == "loss"
    assert results[0]["place"]["function"] == "train" and results[0]["place"]["line"] == 3
    for source in ("shipped", "own", "others"):
        found = results[0]["sources"][source]
        assert (found["found"], found["named"], found["timely"], found["false"]) == (True, True, True, 0)


def test_what_is_done_is_not_done_again(tmp_path: Path, checkouts: Path, judged: Any) -> None:
    operators = {"zero_grad_left_out": load()["zero_grad_left_out"]}
    first = matrix(tmp_path, checkouts, FakeRuns(), operators).run(9, 0)
    runs = FakeRuns()
    assert matrix(tmp_path, checkouts, runs, operators).run(9, 0) == first
    assert runs.commands == []
    judged[0] = []
    again = matrix(tmp_path, checkouts, runs, operators, rejudge=True).run(9, 0)
    assert runs.commands == [] and not any(r["sources"]["own"]["found"] for r in again)


def test_a_mutant_that_computes_the_same_or_fails_does_not_count(tmp_path: Path, checkouts: Path, judged: Any) -> None:
    load()
    operators = {"step_twice": load()["step_twice"]}
    results = matrix(tmp_path, checkouts, FakeRuns(), operators).run(1, 0)
    assert [r["state"] for r in results] == ["equal"]
    runs = FakeRuns()
    runs.crash = "zero_grad"
    operators = {"zero_grad_left_out": load()["zero_grad_left_out"]}
    results = matrix(tmp_path / "second", checkouts, runs, operators).run(1, 0)
    assert [r["state"] for r in results] == ["fails"] and results[0]["why"] == "it broke"


def test_a_program_that_does_not_repeat_itself_is_left_out(tmp_path: Path, checkouts: Path, judged: Any) -> None:
    class Restless(FakeRuns):
        def run(self, program: Program, folder: Path, seed: int, **options: Any) -> tuple[int, str]:
            code, said = super().run(program, folder, seed, **options)
            if options.get("digest") and program.name == "a":
                file = options["digest"] / "0-1.json"
                file.write_text(file.read_text().replace('"loss", 1', f'"loss", {len(self.commands)}'))
            return code, said

    results = matrix(tmp_path, checkouts, Restless(), {"zero_grad_left_out": load()["zero_grad_left_out"]}).run(9, 0)
    assert sorted(r["program"] for r in results) == ["b", "c"]
    assert json.loads((tmp_path / "work/programs/a/baseline.json").read_text())["state"] == "not repeatable"


def test_a_sample_is_spread_over_operators_and_a_larger_one_begins_with_it(checkouts: Path) -> None:
    able = programs("a", "b", "c")
    operators = {n: o for n, o in load().items() if n in ("zero_grad_left_out", "step_twice", "backward_left_out", "update_lost")}
    small = runner.choose(able, operators, lambda p: {"main.py": SOURCE}, 4, 3)
    large = runner.choose(able, operators, lambda p: {"main.py": SOURCE}, 9, 3)
    assert {m.operator.name for m in small} == set(operators)
    assert large[:4] == small and len({m.id for m in large}) == 9


def test_rules_come_from_two_programs_of_other_scripts() -> None:
    able = [*programs("a", "b", "c"), Program("a_again", "a/lab", ".", "main.py", ["--other"])]
    assert {p.name for p in runner.others(able[0], able)} == {"b", "c"}
    assert runner.others(able[0], able) == runner.others(able[0], able)


def test_operators_on_ranks_need_ranks() -> None:
    operators = {"one_rank_skips": load()["one_rank_skips"]}
    assert runner.choose(programs("a"), operators, lambda p: {"main.py": SOURCE}, 9, 0) == []


def test_a_digest_that_ends_early_differs_where_it_ends() -> None:
    clean = {0: [[0, "loss", 1], [0, "parameters", 2], [1, "loss", 3]]}
    assert judge.difference(clean, {0: [[0, "loss", 1]]}) == (0, "parameters")
    assert judge.difference(clean, clean) is None
    # Another step for the same value is no other value.
    assert judge.difference(clean, {0: [[0, "loss", 1], [1, "parameters", 2], [1, "loss", 3]]}) is None


def test_found_needs_an_error_that_the_clean_program_has_not() -> None:
    place = {"words": ["zero_grad"], "file": "main.py", "line": 4}
    both = [violation()]
    assert judge.verdict(both, both, place, 0)["found"] is False
    late = judge.verdict([violation(step=9, text="zero_grad")], [], place, 0)
    assert (late["found"], late["named"], late["timely"]) == (True, True, False)
    assert judge.errors({"violations": [violation(severity="warning"), violation(id="r2")]})[0]["id"] == "r2"


def test_a_place_is_named_by_a_word_or_by_its_line() -> None:
    assert judge.names(violation(function="torch.optim.SGD.zero_grad"), ["zero_grad"], "", 0)
    assert not judge.names(violation(function="xzero_grad"), ["zero_grad"], "", 0)
    assert judge.names(violation(source="/tmp/x/main.py:5"), [], "main.py", 4)
    assert not judge.names(violation(source="/tmp/x/main.py:9"), [], "main.py", 4)


def test_the_table_gives_shares_by_source_and_operator() -> None:
    verdict = {"found": True, "named": True, "timely": False, "false": 0}
    missed = {"found": False, "named": False, "timely": False, "false": 1}
    row = {"state": "counts", "operator": "step_twice", "program": "a", "id": "1", "sources": {"shipped": missed, "own": verdict, "others": missed}}
    text = render([row, {**row, "id": "2", "sources": {"shipped": missed, "own": verdict, "others": verdict}}, {"state": "equal"}])
    assert "2 mutants of 1 programs by 1 operators; 1 others" in text
    assert "| own healthy run, another seed | 2 of 2 (100 %) | 2 of 2 (100 %) | 0 of 2 (0 %) | 0 of 1 |" in text
    assert "| `step_twice` | 2 | 0 / 0 / 0 | 2 / 2 / 0 | 1 / 1 / 0 |" in text


def test_the_manifest_can_be_read_and_a_wrong_edit_is_said(tmp_path: Path, checkouts: Path) -> None:
    known = read(HERE / "programs.toml")
    assert len({p.name for p in known}) == len(known) >= 10
    wrong = Program("a", "a/lab", ".", "main.py", [], edits=[["main.py", "not there", "x"]])
    with pytest.raises(ValueError, match=r"main\.py has no 'not there'"):
        prepare(wrong, checkouts, tmp_path / "copy")
    with pytest.raises(FileNotFoundError, match="no checkout of z/lab"):
        prepare(Program("z", "z/lab", ".", "main.py", []), checkouts, tmp_path / "copy")


def test_programs_of_the_wild_corpus_take_turns_and_keep_their_shims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def project(name: str, half: str, **more: object) -> manifest.Project:
        whole = [manifest.Program(project=name, half=half, path=f"code/{n}.py", trains="a line", files={"data/in.txt": "text"}, shims=("limit",), **more) for n in ("a", "b")]  # type: ignore[arg-type]
        return manifest.Project(name=name, repository="", commit="", licence="", half=half, programs=tuple(whole))

    known = [project("one+x", "first"), project("two+y", "first"), project("far+z", "second"), project("bad+w", "first", bug="clips first")]
    monkeypatch.setattr(manifest, "read_corpus", lambda: known)
    monkeypatch.setattr(sources, "checkout", lambda project, folder: (folder / project.name, ""))
    for name in ("one+x", "two+y"):
        (tmp_path / name / "code").mkdir(parents=True)
        (tmp_path / name / "code" / "a.py").write_text("import torch")
    found = sources.corpus("first", 40, tmp_path)
    assert [p.name for p in found] == ["one+x--code-a", "two+y--code-a", "one+x--code-b", "two+y--code-b"]
    assert [(p.wild.steps, p.wild.shims) for p in found if p.wild] == [(40, ("limit",))] * 4
    prepare(found[0], tmp_path, tmp_path / "copy")
    assert found[0].script == "a.py" and (tmp_path / "copy" / "a.py").is_file() and (tmp_path / "copy" / "data" / "in.txt").read_text()
