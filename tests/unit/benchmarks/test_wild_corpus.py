"""The wild corpus: its manifests, what is kept between campaigns, its tables. Programs of it are not trained here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from helpers.trained import record

from benchmarks.wild import __main__ as campaign
from benchmarks.wild import attempt as attempts
from benchmarks.wild import files
from benchmarks.wild.attempt import Arm, Result, attempt, shown
from benchmarks.wild.chances import chances
from benchmarks.wild.manifest import ManifestError, Program, read_corpus, read_project
from benchmarks.wild.suites import Outcome, outcomes, read_suites
from benchmarks.wild.table import as_json, records, rules, text, write_section
from proctor.invariants.trace import Trace

GOOD = """
repository = "https://github.com/owner/name"
commit = "0123456789012345678901234567890123456789"
licence = "MIT"
half = "first"

[[programs]]
paths = ["a.py", "b/c.py"]
trains = "a line"
"""


def written(folder: Path, body: str, name: str = "owner+name") -> Path:
    path = folder / f"{name}.toml"
    path.write_text(body)
    return path


def result(name: str, half: str = "first", state: str = "healthy", **more: Any) -> Result:
    return Result(name=name, project=name.split("--")[0], half=half, product="abc", trains="", state=state, **more)


def false_error(rule: str, severity: str = "error") -> dict[str, Any]:
    return {"rule": rule, "relation": "argument", "severity": severity, "tier": "page", "text": "t", "seen": "s", "step": 1}


def test_an_entry_with_two_paths_is_two_programs(tmp_path: Path) -> None:
    project = read_project(written(tmp_path, GOOD))
    assert [p.name for p in project.programs] == ["owner+name--a", "owner+name--b-c"]
    assert [p.place for p in project.programs] == [".", "b"]
    assert all(p.half == "first" and p.shims == ("limit",) for p in project.programs)


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        ("https://github.com/owner/name", "https://example.org/name", "is not https://github.com/OWNER/NAME"),
        ("owner/name", "other/name", "is called other+name.toml"),
        ("0123456789012345678901234567890123456789", "main", "is not 40 hexadecimal digits"),
        ('"first"', '"third"', "half"),
        ('trains = "a line"', "", "trains"),
        ('trains = "a line"', 'trains = "a line"\nepochs = 3', "epochs"),
        ('"a.py"', '"../a.py"', "leads out of the checkout"),
        ('"a.py"', '"b/c.py"', "is there twice"),
        ('trains = "a line"', 'trains = "a line"\nlauncher = "mpirun"', "neither 'python' nor 'torchrun N'"),
        ('trains = "a line"', 'trains = "a line"\nshims = ["nothing"]', "no shim 'nothing'"),
        ('trains = "a line"', 'trains = "a line"\ntimeout_s = 0', "timeout_s"),
        ("[[programs]]", "[[programs", "owner+name.toml"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_manifest_is_said_in_one_line(tmp_path: Path, was: str, now: str, said: str) -> None:
    assert was in GOOD
    with pytest.raises(ManifestError) as caught:
        read_project(written(tmp_path, GOOD.replace(was, now, 1)))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_folder_is_no_corpus(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="no manifest"):
        read_corpus(tmp_path)


def test_the_corpus_is_broad_and_its_halves_share_no_project() -> None:
    projects = read_corpus()
    programs = [p for project in projects for p in project.programs if not p.skip]
    assert len(programs) >= 150
    assert len({p.project for p in programs}) >= 30
    halves = [{p.project.lower() for p in programs if p.half == half} for half in ("first", "second")]
    assert not halves[0] & halves[1]
    assert all(len(half) >= 12 for half in halves)
    assert {kind for p in programs for kind in p.files.values()} <= files.MAKERS.keys()


def test_suites_name_projects_of_the_corpus() -> None:
    names = {project.name for project in read_corpus()}
    assert {suite.project for suite in read_suites() if suite.project} <= names, "the others are of an installed library"


def test_files_are_the_same_every_time(tmp_path: Path) -> None:
    wanted = {f"data/{kind}": kind for kind in files.MAKERS}
    for folder in ("one", "two"):
        files.make(tmp_path / folder, wanted)
    for name in wanted:
        made = (tmp_path / "one" / name).read_bytes()
        assert len(made) > 1000
        assert made == (tmp_path / "two" / name).read_bytes()


def test_few_programs_come_from_many_projects() -> None:
    projects = read_corpus()
    first = campaign.chosen(projects, "", "")[:30]
    assert len({p.project for p in first}) == 30
    assert all(p.half == "second" for p in campaign.chosen(projects, "second", ""))


def test_a_program_with_a_result_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = read_project(written(tmp_path, GOOD))
    (tmp_path / "wild" / project.name).mkdir(parents=True)
    ran: list[str] = []

    def fake(program: Program, *_: object) -> Result:
        ran.append(program.name)
        return result(program.name)

    monkeypatch.setattr(campaign, "attempt", fake)
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / f"{project.programs[0].name}.json").write_bytes(msgspec.json.encode(result(project.programs[0].name)))
    (kept / f"{project.programs[1].name}.json").write_bytes(b'{"name": "cut')
    for _ in range(2):
        campaign.run_all(project.programs, [project], tmp_path / "wild", kept, "abc", 1)
    assert ran == [project.programs[1].name]
    assert len(campaign.read_results(kept, project.programs)) == 2


@pytest.mark.parametrize(
    ("more", "state", "why"),
    [
        ({"skip": "needs a GPU"}, "skipped", "needs a GPU"),
        ({"needs": ("no_such_package_at_all",)}, "skipped", "not installed"),
        ({"path": "missing.py"}, "skipped", "not in the checkout"),
        ({"path": "fails.py"}, "does not run", "SystemExit"),
        ({"path": "sleeps.py", "timeout_s": 1}, "slow", ""),
    ],
)
def test_a_program_that_does_not_run_bare_is_listed_and_not_watched(
    tmp_path: Path, more: dict[str, Any], state: str, why: str
) -> None:
    (tmp_path / "checkout").mkdir()
    (tmp_path / "checkout" / "fails.py").write_text("import sys\nsys.exit('SystemExit: no data')\n")
    (tmp_path / "checkout" / "sleeps.py").write_text("import time\ntime.sleep(60)\n")
    program = Program(**{"project": "owner+name", "half": "first", "path": "fails.py", "trains": "", **more})
    found = attempt(program, tmp_path / "checkout", tmp_path / "work", "abc")
    assert (found.state, why in found.why, found.watched) == (state, True, None)


@pytest.mark.parametrize(
    ("numbers", "bits"), [("fixed", "equal"), ("watched", "differ"), ("drawn", "not deterministic"), ("placed", "not deterministic")]
)  # fmt: skip
def test_who_changed_a_number_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbers: str, bits: str) -> None:
    runs = iter([0, 1, 0, 1])  # as a bar that the clock draws: two runs agree by chance

    def arm(program: Program, checkout: Path, folder: Path, *_: object, stir: int = 0) -> Arm:
        watched = int(folder.name == "watched")
        number = {"fixed": 0, "watched": watched, "drawn": next(runs), "placed": watched or stir}[numbers]
        return Arm(exit=0, wall_s=1.0, cpu_s=1.0, losses=[str(number)])

    monkeypatch.setattr(attempts, "_arm", arm)
    monkeypatch.setattr(attempts, "judged", lambda *_: {"steps": 1})
    (tmp_path / "a.py").touch()
    program = Program(project="owner+name", half="first", path="a.py", trains="")
    assert attempt(program, tmp_path, tmp_path / "work", "abc").bits == bits


def test_a_bar_that_is_drawn_more_often_is_the_same_bar() -> None:
    once = "\rloss: 1.61 |  10%\rloss: 1.59 | 100%\nacc 0.5\r\n"
    often = "\rloss: 1.61 |  10%\rloss: 1.61 |  10%\rloss: 1.59 | 100%\rloss: 1.59 | 100%\nacc 0.5\n"
    assert shown(once) == shown(often) == "loss: 1.59 | 100%\nacc 0.5\n"
    assert shown(often.replace("1.59", "1.58")) != shown(once)


def test_bars_below_each_other_that_are_drawn_more_often_are_the_same_bars() -> None:
    drawn = "\n\rloss: {} | {:3}%\x1b[A"  # as tqdm draws a bar below another
    once = "\repoch 0" + drawn.format(1.59, 100) + "\repoch 1\n\nacc 0.5\n"
    often = "\repoch 0" + drawn.format(1.61, 10) + drawn.format(1.61, 10) + drawn.format(1.59, 100) + "\repoch 1\n\nacc 0.5\n"
    assert shown(once) == shown(often) == "epoch 1\nloss: 1.59 | 100%\nacc 0.5\n"
    assert shown(often.replace("1.59", "1.58")) != shown(once)


def test_a_program_that_diverges_by_itself_is_not_healthy(tmp_path: Path) -> None:
    (tmp_path / "checkout").mkdir()
    (tmp_path / "checkout" / "a.py").write_text(
        "import torch\nmodel = torch.nn.Linear(2, 1)\noptimizer = torch.optim.SGD(model.parameters(), lr=float('inf'))\n"
        "model(torch.ones(1, 2)).sum().backward()\noptimizer.step()\n"
    )
    program = Program(project="owner+name", half="first", path="a.py", trains="", shims=("limit",))
    found = attempt(program, tmp_path / "checkout", tmp_path / "work", "abc")
    assert (found.state, found.watched, found.why) == ("diverges", None, "a parameter is NaN or infinite at its end")


def test_counts_by_rule_are_those_of_runs_in_which_it_applied() -> None:
    ends = {"r1": ["argument", "held", "claim"], "r2": ["argument", "idle", ""], "r3": ["contain", "unknown", ""]}
    table = rules([
        result("a--x", verdict={"rules": ends}), result("b--y", verdict={"rules": {**ends, "r1": ["argument", "violated", "claim"]}}),
    ])  # fmt: skip
    assert (table["r1"]["applied"], table["r1"]["failed"], table["r1"]["programs"]) == (2, 1, ["b--y"])
    assert table["r2"]["applied"] == 0
    assert (table["r3"]["applied"], table["r3"]["unknown"]) == (0, 2)


def test_a_law_counts_where_it_could_fail_and_halves_say_their_commits() -> None:
    held, failed = {"r1": ["course", "held", "c"]}, {"r1": ["course", "violated", "c"]}
    told = text(
        [
            result("a--x", verdict={"rules": held, "chances": {"r1": "batch"}}),
            result("a--y", verdict={"rules": failed, "chances": {"r1": "batch"}}),
            result("a--z", verdict={"rules": held, "chances": {}}),
            msgspec.structs.replace(result("b--w", half="second", verdict={"rules": held}), product="def"),
        ],
        ["abc", "def"],
    )
    assert "| batch | 2 | 1 |" in told
    assert "| first (at abc) | 3 |" in told
    assert "| second (at def) | 1 |" in told


def test_records_are_what_a_pack_takes_in(tmp_path: Path) -> None:
    from proctor.invariants.record import read_records

    told = {"tier": "ticket", "severity": "error", "title": "t", "state": "resolved", "rules": ["r1", "r3"]}
    made = records(
        [
            result("a--x", verdict={"rules": {"r1": ["argument", "held", ""], "r2": ["argument", "idle", ""]}}, incidents=[told]),
            result("a--y", verdict={"rules": {"r1": ["argument", "violated", ""]}, "violations": [false_error("r1")]}, incidents=[told]),
            result("a--z", state="does not run", verdict={"rules": {"r1": ["argument", "held", ""]}}),
        ],
        "wild, first half",
    )
    path = tmp_path / "records.json"
    path.write_bytes(msgspec.json.encode(made))
    read = read_records(path)
    assert read.rules.keys() == {"r1"}
    one = read.rules["r1"]
    assert (one.tested, one.failed, one.retracted, one.programs, read.corpus) == (2, 1, 1, 2, "wild, first half")


def test_a_page_that_was_taken_back_was_a_page(tmp_path: Path) -> None:
    from benchmarks.wild.attempt import incidents

    (tmp_path / "verify").mkdir()
    kept = {"key": "k", "tier": "ticket", "severity": "warning", "title": "t", "state": "resolved", "violations": [{"id": "r1"}]}
    quiet = {**kept, "key": "q", "state": "suspected"}
    (tmp_path / "verify" / "incidents.json").write_bytes(msgspec.json.encode({"incidents": [kept, quiet]}))
    assert [i["tier"] for i in incidents(tmp_path)] == ["ticket"]
    event = {"id": 1, "time": 1.0, "kind": "incident", "data": {"key": "k", "state": "firing", "tier": "page", "title": "t"}}
    (tmp_path / "verify" / "events.jsonl").write_bytes(b"cut{\n" + msgspec.json.encode(event) + b"\n")
    assert [(i["tier"], i["rules"]) for i in incidents(tmp_path)] == [("page", ["r1"])]


def test_a_program_counts_as_wrong_by_errors_pages_bits_and_blindness_each() -> None:
    verdict = {"steps": 3, "violations": [false_error("r1"), false_error("r2", "warning")], "rules": {}}
    page = {"tier": "page", "severity": "error", "title": "t", "state": "firing", "ended": ""}
    data = as_json([
        result("a--x", verdict=verdict, recorded=True, incidents=[page], bits="equal"),
        result("a--y", verdict={"violations": [false_error("r2", "warning")]}, bits="differ"),
        result("b--z", half="second", state="crashed"),
        result("b--w", half="second", state="does not run"),
    ])  # fmt: skip
    first, second = data["halves"]["first"], data["halves"]["second"]
    assert (first["with errors"], first["with pages"], first["never recorded"], first["bits differ"]) == (1, 1, 1, 1)
    assert (second["programs"], second["healthy"], second["crashed"]) == (2, 1, 1)


def test_the_held_half_shows_figures_and_no_rules(tmp_path: Path) -> None:
    held = result("a--x", half="second", recorded=True, verdict={
        "steps": 1, "violations": [false_error("r1")], "rules": {"r1": ["argument", "violated", "the claim of a held program"]},
    })  # fmt: skip
    told = text([held], ["abc"])
    assert "the claim of a held program" not in told
    assert "Of 1 shipped rules 1 applied in a healthy program, 0 in 100 or more." in told
    assert "the claim of a held program" not in campaign.line(held)
    assert "1 errors" in campaign.line(held)
    page = tmp_path / "evaluation.md"
    page.write_text("before\n<!-- wild -->\nold\n<!-- /wild -->\nafter\n")
    write_section(page, told)
    assert page.read_text().startswith("before\n") and page.read_text().endswith("after\n")
    assert "old" not in page.read_text()
    page.write_text("no marks")
    with pytest.raises(ValueError, match="no <!-- wild -->"):
        write_section(page, told)


def test_outcomes_of_a_suite_are_compared_test_by_test(tmp_path: Path) -> None:
    report = tmp_path / "junit.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="t" name="a"/><testcase classname="t" name="b"><failure/></testcase>'
        '<testcase classname="t" name="c"><skipped/></testcase></testsuite></testsuites>'
    )
    bare = outcomes(report)
    assert bare == {"t::a": "passed", "t::b": "failed", "t::c": "skipped"}
    assert Outcome(name="s", state="run", bare=bare, attached={**bare, "t::a": "failed"}).different == ["t::a"]
    assert Outcome(name="s", state="run", bare=bare, attached={"t::a": "passed"}).different == ["t::b", "t::c"]
    report.write_text("<cut")
    assert outcomes(report) == {}


PROGRAM = """
    model, loader = nn.Sequential(nn.Linear(16, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, 3)), DataLoader(torch.randn(24, 16), 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, weight_decay=1e-4)
    for epoch in range(2):
        model.train()
        for x in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for x in loader:
                model(x)
"""


def test_what_a_run_could_have_failed_on_is_asked_of_the_run(tmp_path: Path) -> None:
    record(tmp_path, {"trains": PROGRAM}, [("trains", "run", 0, 4, "")])
    found = chances(Trace.load([tmp_path / "trains-run"]))
    assert {"fed", "again", "evaluates", "resumes", "restored", "masks", "batch", "scored"} <= set(found)
    assert not {"clips", "successive", "parted"} & set(found)
