"""What lies beside a run, and annotations for GitHub."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess

import pytest
from helpers.processes import BACK, ZERO, process
from helpers.relations import ALL, rule
from helpers.runs import write_run

from proctor.invariants.pack import Pack
from proctor.invariants.trace import Run
from proctor.verify.checker import check
from proctor.verify.report import Report, renderer
from proctor.verify.report.beside import MAX_CAPSULES, Beside, followed, read_beside
from proctor.verify.report.formats import html
from proctor.verify.report.load import load

NASTY = "::error file=x,line=1::boo\n::stop-commands::t%0A\r\u202e"


def violated(path, **more) -> Report:
    states = [{"var": {"name": NASTY}, "step": 1, "flags": 4}]
    opened = Run(write_run(path, [process(lost_from=2, states=states)]))
    result = check(opened.trace, [Pack([rule("test_happens", first=ZERO, then=BACK), rule("test_finite", variable=NASTY)])], relations=ALL)
    return Report(result, opened.trace, opened.info, 1, **more)


def write_capsule(run, name, **said):
    (run / "capsules" / name).mkdir(parents=True)
    (run / "capsules" / name / "capsule.json").write_text(json.dumps(said))


def test_incidents_and_capsules_are_shown_at_the_incident_that_they_belong_to(tmp_path):
    report = violated(tmp_path / "r")
    first = report.result.incidents[0].violations[0]
    key = f"proctor:my:job:{first.id}:dp"
    (tmp_path / "r" / "verify").mkdir()
    book = {"incidents": [{"key": key, "title": "one", "state": "resolved", "began": 1.7e9, "ended": 1.7e9 + 60, "rules": {first.id: {}}}, {"key": "proctor:my:PR202:r", "title": "silent", "state": "firing", "began": 1.7e9}, {"key": "m", "title": "merged", "state": "resolved", "merged": key}]}
    (tmp_path / "r" / "verify" / "incidents.json").write_text(json.dumps(book))
    write_capsule(tmp_path / "r", "abc-step1-rank0", key=key, step=1, rank=0)
    write_capsule(tmp_path / "r", "other-step9-rank1", key="proctor:my:job:elsewhere:dp", step=9, rank=1)
    beside = read_beside(tmp_path / "r")
    assert [(f.title, f.state) for f in beside.followed] == [("silent", "firing"), ("one", "resolved")]
    assert [c.path for c in beside.capsules_of({first.id})] == ["capsules/abc-step1-rank0"]
    text = html.render(Report(report.result, report.trace, report.info, 1, beside=beside))
    card = text[text.index('id="incident-1"') : text.index('id="all"')]
    assert '<span class="state resolved">resolved 2023-11-14 22:14:20 UTC</span>' in card
    assert "capsules/abc-step1-rank0" in card
    assert "other-step9" not in card
    assert "Followed by the verifier" in text


def test_why_no_step_was_kept_is_shown_unless_one_was(tmp_path):
    report = violated(tmp_path / "r")
    first = report.result.incidents[0].violations[0]
    key = f"proctor:job:{first.id}:dp"
    (tmp_path / "r" / "verify").mkdir()
    book = {"incidents": [{"key": key, "title": "one", "state": "firing", "not_kept": "No step was <kept>.", "rules": {first.id: {}}}]}
    (tmp_path / "r" / "verify" / "incidents.json").write_text(json.dumps(book))

    def page() -> str:
        return html.render(Report(report.result, report.trace, report.info, 1, beside=read_beside(tmp_path / "r")))

    assert "No step was &lt;kept&gt;." in page()
    write_capsule(tmp_path / "r", "abc-step1-rank0", key=key, step=1, rank=0)
    assert "No step was" not in page()


def test_firing_ones_are_counted_behind_thousands_that_are_over(tmp_path):
    (tmp_path / "verify").mkdir()
    rows = [{"key": f"k{i}", "title": f"t{i}", "state": "firing" if i >= 1200 else "resolved"} for i in range(2000)]
    (tmp_path / "verify" / "incidents.json").write_text(json.dumps({"incidents": rows}))
    beside = read_beside(tmp_path)
    assert len(beside.followed) == 2000
    text = html.render(Report(None, beside=beside))
    assert "800 incidents firing" in text
    assert "and 1,950 more incidents" in text


@pytest.mark.parametrize(("said", "shown"), [("1 of 2: 0", "ranks 1 of 2: 0"), ([3, 7], "ranks 3, 7"), ("ranks 0 and 1 differ", "ranks 0 and 1 differ"), ("", "")])
def test_ranks_are_called_so_once(said, shown):
    assert followed({"ranks": said}).ranks == shown


def test_what_is_beside_a_run_is_not_trusted(tmp_path):
    (tmp_path / "verify").mkdir()
    assert read_beside(tmp_path) == Beside()
    for blob in ("", "[]", "{}", '{"incidents": 3}', '[[1], null, {"key": 1, "first_step": true, "began": "x", "rules": 3}]', "[" * 100_000):
        (tmp_path / "verify" / "incidents.json").write_text(blob)
        read_beside(tmp_path)
    (tmp_path / "verify" / "incidents.json").unlink()
    os.mkfifo(tmp_path / "verify" / "incidents.json")
    assert read_beside(tmp_path).followed == []
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "capsule.json").write_text('{"key": "x"}')
    (tmp_path / "capsules").mkdir()
    (tmp_path / "capsules" / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "capsules" / "<b>").mkdir()
    (tmp_path / "capsules" / "file").write_text("x")
    for i in range(MAX_CAPSULES + 5):
        write_capsule(tmp_path, f"c{i}", key="k")
    found = read_beside(tmp_path).capsules
    assert len(found) == MAX_CAPSULES
    assert {c.path for c in found} <= {f"capsules/c{i}" for i in range(MAX_CAPSULES + 5)}


def test_a_run_without_a_check_says_what_its_records_cannot_show(tmp_path):
    report = load(write_run(tmp_path / "r", [{"rank": 0, "world": 3, "dropped": 4}]))
    assert report.result is None
    text = html.render(report)
    assert "ranks 1–2 of 3 left no record" in text
    assert "rank 0 lost 4 records" in text


def test_annotations_are_one_command_a_line_whatever_is_in_the_names(tmp_path):
    text = renderer("github").render(violated(tmp_path / "r"))
    lines = text.splitlines()
    commands = [line for line in lines if line.startswith("::")]
    assert lines[-1] == "Proctor: 2 incidents, 2 violated rules, 2 checked"
    assert len(commands) == len(lines) - 1
    shape = re.compile(r"::(error|warning|notice) (?:[a-z]+=[^:,\r\n]*(?:,|(?=::)))+::[^\r\n]*")
    assert all(shape.fullmatch(c) for c in commands)
    assert "::error file=train.py,line=3,title=PR190 " in text
    assert "%0Aexpected: " in text
    assert "\u202e" not in text
    assert not [line for line in lines if line.startswith("::stop-commands")]


def test_annotations_say_that_a_run_is_inconclusive(tmp_path):
    opened = Run(write_run(tmp_path / "r", [{}]))
    result = check(opened.trace, [Pack([rule("test_finite", variable="w")])], relations=ALL)
    text = renderer("github").render(Report(result, opened.trace, opened.info, 3))
    assert "::warning title=Proctor%3A inconclusive::" in text
    assert "::notice title=Proctor%3A not checked::" in text


def test_a_sarif_result_has_a_place_also_where_the_trace_knows_none(tmp_path):
    opened = Run(write_run(tmp_path / "r", [{"states": [{"var": {"name": "w"}, "step": 1, "flags": 4}]}], program="train.py", command=["torchrun", "jobs/train.py", "--x"]))
    result = check(opened.trace, [Pack([rule("test_finite", variable="w")])], relations=ALL)
    log = json.loads(renderer("sarif").render(Report(result, opened.trace, opened.info, 1)))
    (found,) = log["runs"][0]["results"]
    assert found["locations"][0]["physicalLocation"] == {"artifactLocation": {"uri": "jobs/train.py"}, "region": {"startLine": 1}}
    assert found["locations"][0]["logicalLocations"][0]["fullyQualifiedName"] == "w"


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_a_browser_shows_the_page_and_runs_nothing_of_the_trace(tmp_path):
    nasty = "</title></script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    states = [{"var": {"name": nasty, "model": nasty, "module": nasty}, "step": s, "fp": s, "norm": 1.0, "flags": 4 if s else 0} for s in range(3)]
    opened = Run(write_run(tmp_path / "r", [process(states=states)], command=["python", nasty]))
    result = check(opened.trace, [Pack([rule("test_finite", variable=nasty)])], relations=ALL)
    (tmp_path / "report.html").write_text(html.render(Report(result, opened.trace, opened.info, 1)))
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", f"file://{tmp_path / 'report.html'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    if "<html" not in done.stdout:
        pytest.skip(f"chromium does not run here: {done.stderr[-200:]}")
    assert "<title>1 incident, 1 violated rule · Proctor</title>" in done.stdout
    assert "owned'&lt;/script&gt;" in done.stdout
    assert '<input type="search" id="filter"' in done.stdout
    assert "hidden" not in done.stdout[done.stdout.index('id="filter"') :].partition(">")[0]  # our script ran
