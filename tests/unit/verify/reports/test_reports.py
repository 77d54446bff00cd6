"""Reports: the contract's keys, valid formats, and nothing of a trace that acts in a page or a terminal."""

from __future__ import annotations

import json
import os
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest
from helpers.processes import BACK, ZERO, process
from helpers.relations import ALL, rule
from helpers.runs import write_run

from proctor.invariants.invariant import Severity
from proctor.invariants.pack import Pack
from proctor.invariants.trace import Run
from proctor.verify import wording
from proctor.verify.checker import check, exit_code
from proctor.verify.coverage import coverage
from proctor.verify.report import FORMATS, Report, renderer, write_text
from proctor.verify.report.formats import html
from proctor.verify.report.formats import json_ as jsonout
from proctor.verify.report.formats.html.excerpt import excerpt
from proctor.verify.report.formats.html.timeline import COLUMNS, ROWS, timeline
from proctor.verify.report.summary import summarise

NASTY = "layers.0.<script>alert('1')</script>\"&amp;\x1b[31m\u202e.wéight✓[bold]"


def report_of(path, processes, rules, **more) -> Report:
    opened = Run(write_run(path, processes, **more))
    seen = coverage(opened.trace)
    result = check(opened.trace, [Pack(rules)], relations=ALL)
    code = exit_code(result, Severity.ERROR, complete=seen.complete)
    return Report(result, opened.trace, opened.info, code, ["my pack.json"], made="now", missing=seen.missing)


@pytest.fixture
def violated(tmp_path):
    states = [{"var": {"name": NASTY, "module": "<i>Linear</i>"}, "step": s, "flags": 4 if s > 2 else 0} for s in range(6)]
    rules = [rule("test_happens", first=ZERO, then=BACK), rule("test_finite", variable=NASTY), rule("test_finite", variable="gone")]
    return report_of(tmp_path / "bad", [process(lost_from=2, states=states)], rules, command=["python", "<b>x</b>.py", "a b"])


@pytest.fixture
def clean(tmp_path):
    return report_of(tmp_path / "good", [process()], [rule("test_happens", first=ZERO, then=BACK)])


class Page(HTMLParser):
    """Every tag and attribute of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.words += data


def test_json_has_the_keys_of_the_contract(violated):
    tree = json.loads(renderer("json").render(violated))
    assert tree["schema"] == 1
    assert {"violations", "incidents", "checked", "not_triggered", "unknown"} <= tree.keys()
    wanted = "id code relation severity text step rank function variable module source expected seen support confirmed"
    assert set(wanted.split()) <= tree["violations"][0].keys()
    assert tree["incidents"][0].keys() == {"title", "first_step", "violations"}
    assert tree["incidents"][0]["violations"] == [v["id"] for v in tree["violations"][:1]]
    assert renderer("json").render(violated).isascii()


def test_saved_json_reads_back_the_same(violated, tmp_path):
    path = tmp_path / "check.json"
    write_text(path, jsonout.render(violated))
    assert jsonout.read(path) == (violated.result, 1, ["my pack.json"])


@pytest.mark.parametrize("blob", [b"", b"{}", b"[1]", b"\xff\xfe", b'{"schema":1,"violations":[{}]}', b'{"schema":99,"violations":[],"incidents":[],"checked":0,"not_triggered":0,"unknown":0}'])
def test_damaged_saved_json_is_ignored(tmp_path, blob):
    (tmp_path / "check.json").write_bytes(blob)
    assert jsonout.read(tmp_path / "check.json") is None
    assert jsonout.read(tmp_path / "absent.json") is None


def test_sarif_is_minimal_and_valid(violated):
    log = json.loads(renderer("sarif").render(violated))
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] in ("none", "note", "warning", "error")
        assert result["partialFingerprints"]
        assert result["message"]["text"]
    happens = next(r for r in run["results"] if r["ruleId"] == "PR190")
    physical = happens["locations"][0]["physicalLocation"]
    assert physical == {"artifactLocation": {"uri": "train.py"}, "region": {"startLine": 3}}


def test_sarif_quotes_paths(tmp_path):
    calls = [{"fn": "b", "step": 0, "site": "/srv/my code/ä.py:7"}]
    report = report_of(tmp_path / "r", [{"calls": calls}], [rule("test_happens", first="a", then="b")])
    assert "file:///srv/my%20code/%C3%A4.py" in renderer("sarif").render(report)


def test_junit_counts_its_cases(violated):
    suite = ET.fromstring(renderer("junit").render(violated)).find("testsuite")
    assert suite is not None
    cases = suite.findall("testcase")
    assert suite.get("tests") == str(len(cases)) == "3"
    assert (suite.get("failures"), suite.get("skipped"), suite.get("errors")) == ("2", "1", "0")
    failure = cases[0].find("failure")
    assert failure is not None
    assert "look at: the training loop" in (failure.text or "")


def test_junit_of_an_inconclusive_run_is_an_error(tmp_path):
    report = report_of(tmp_path / "r", [{}], [rule("test_finite", variable="w")])
    suite = ET.fromstring(renderer("junit").render(report)).find("testsuite")
    assert suite is not None
    assert suite.get("errors") == "1"


def test_terminal_says_the_verdict_first_and_what_to_type_next(violated):
    text = renderer("terminal").render(violated)
    assert text.startswith("PROCTOR  2 incidents, 2 violated rules, 2 checked, 1 not triggered\n")
    assert "ERROR  Optimizer.zero_grad never ran before Tensor.backward (from step 2)" in text
    assert "held in 120 examples of 3 runs, 2 programs" in text
    assert "-i 'my pack.json'" in text
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_terminal_takes_names_literally_and_prints_no_control_characters(violated):
    text = renderer("terminal").render(violated)
    assert "[bold]" in text
    assert "\\x1b[31m\\u202e" in text
    assert not {"\x1b", "\u202e"} & set(text)


@pytest.mark.parametrize("width", ["20", "40", "200"])
def test_terminal_fits_its_width(violated, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", width)
    body = renderer("terminal").render(violated).split("Not checked")[0]
    facts = [line for line in body.splitlines() if line.startswith("  ")]
    assert facts
    assert max(map(len, facts)) <= max(int(width), 36)


def test_terminal_folds_what_follows_unless_all_is_asked(tmp_path):
    from dataclasses import replace

    states = [{"var": {"name": f"fc.w{i}"}, "step": 1, "flags": 4} for i in range(15)]
    report = report_of(tmp_path / "r", [{"states": states}], [rule("test_finite", variable=f"fc.w{i}") for i in range(15)])
    assert "+6 more: --all" in renderer("terminal").render(report)
    assert "more: --all" not in renderer("terminal").render(replace(report, everything=True))


def test_clean_and_inconclusive_reports_say_so(clean, tmp_path):
    assert renderer("terminal").render(clean).startswith("PROCTOR  no violation, 1 checked\n")
    empty = report_of(tmp_path / "r", [{}], [rule("test_finite", variable="w")])
    assert "INCONCLUSIVE" in renderer("terminal").render(empty)
    assert 'header class="inconclusive"' in renderer("html").render(empty)
    assert "No violations" in renderer("html").render(clean)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_renders_every_state(name, violated, clean, tmp_path):
    for report in (violated, clean, Report(None), Report(None, clean.trace, clean.info)):
        assert renderer(name).render(report)


def test_page_escapes_everything_of_a_trace(violated):
    text = html.render(violated)
    page = Page(text)
    assert page.tags.count("script") == 1  # our own
    assert not {"b", "img", "iframe", "object"} & set(page.tags)
    assert page.tags.count("i") == 0 or "<i>Linear" not in text
    assert not [name for name, _ in page.attributes if name.startswith("on") or name == "style"]
    assert "<script>alert('1')</script>" in page.words  # shown, as text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "wéight✓" in page.words


def test_page_loads_nothing(violated):
    page = Page(html.render(violated))
    policy = dict(page.attributes).get("content")
    assert any(v and v.startswith("default-src 'none'") for k, v in page.attributes if k == "content"), policy
    links = [v for k, v in page.attributes if k in ("href", "src", "action")]
    assert all(v and (v.startswith("#") or v == "data:,") for v in links)


def test_page_shows_source_lines_of_a_site(tmp_path):
    (tmp_path / "train.py").write_text("".join(f"line_{i} = '<{i}>'\n" for i in range(1, 21)))
    rules = [rule("test_happens", first=ZERO, then=BACK)]
    report = report_of(tmp_path / "r", [process(lost_from=2)], rules, cwd=str(tmp_path))
    words = Page(html.render(report)).words
    assert "line_7 = '<7>'" in words
    assert "line_8" not in words


def test_excerpt_marks_its_line_and_stays_inside_the_file(tmp_path):
    file = tmp_path / "a b.py"
    file.write_text("one\n\ttwo\nthree\n")
    lines = excerpt(f"{file}:2", {f"{file}:2"})
    assert [(line.number, line.text, line.here) for line in lines] == [(1, "one", False), (2, "    two", True), (3, "three", False)]
    assert excerpt(f"{file}:99", {f"{file}:99"}) == []
    assert excerpt(f"{file}:0", {f"{file}:0"}) == []
    assert excerpt(f"{file}:{10**30}", {f"{file}:{10**30}"}) == []


def test_excerpt_reads_only_named_python_text(tmp_path):
    def allowed(path):
        return bool(excerpt(f"{path}:1", {f"{path}:1"}))

    def file(name, data):
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    assert allowed(file("ok.py", b"x = 1\n"))
    assert allowed(file("script", b"#!/usr/bin/env python\n"))
    assert not excerpt(f"{tmp_path / 'ok.py'}:1", set())  # not a site of the trace
    assert not allowed(file("secret.key", b"hush\n"))
    assert not allowed(file("binary.py", b"x\0y\n"))
    assert not allowed(file("huge.py", b"x\n" * (1 << 20) + b"x"))
    assert not allowed(tmp_path / "absent.py")
    assert not allowed(tmp_path)
    os.mkfifo(tmp_path / "pipe.py")
    assert not allowed(tmp_path / "pipe.py")
    assert not excerpt("nul\0.py:1", {"nul\0.py:1"})


@pytest.mark.parametrize(("ranks", "steps"), [(1, 1), (2, 60), (64, 10_000), (300, 97)])
def test_timeline_is_binned_to_fit(tmp_path, ranks, steps):
    rows = [{"rank": r, "world": ranks, "context": [{"step": steps - 1}], "states": [{"var": {"name": "w"}, "step": s, "flags": 4} for s in {0, steps - 1}] if r == ranks - 1 else []} for r in range(ranks)]
    report = report_of(tmp_path / "r", rows, [rule("test_finite", variable="w")])
    picture = timeline(report.trace, report.result.violations, [])
    assert picture is not None
    assert len(picture.rows) <= ROWS
    assert len(picture.cells) <= COLUMNS * len(picture.rows)
    for cell in picture.cells:
        assert picture.left - 1e-6 <= cell.x <= picture.width
        assert cell.x + picture.cell_width <= picture.width + 1e-6
    assert {c.y for c in picture.cells} == {picture.rows[-1].y}
    assert "failing example" in picture.cells[0].tip


def test_timeline_shows_missing_ranks_and_setup(tmp_path):
    rows = [{"rank": 0, "world": 3, "states": [{"var": {"name": "w"}, "step": -1, "flags": 4}, {"var": {"name": "w"}, "step": 2}]}, {"rank": 2, "world": 3}]
    report = report_of(tmp_path / "r", rows, [rule("test_finite", variable="w")])
    picture = timeline(report.trace, report.result.violations, [1])
    assert picture is not None
    assert [(r.label, r.missing) for r in picture.rows] == [("rank 0", False), ("rank 1", True)]
    assert picture.setup == picture.left
    assert picture.cells[0].tip.startswith("before the first step")
    assert "no record" in html.render(report)


def test_summary_counts_what_was_recorded(tmp_path):
    calls = [{"fn": "f", "step": s, "phase": "eval" if s else "init", "user_meta": {"loss": 3.0 - s}} for s in range(3)]
    states = [{"var": {"name": f"fc.w{i}", "module": "torch.nn.Linear"}, "step": 0} for i in range(2)]
    opened = Run(write_run(tmp_path / "r", [{"calls": calls, "states": states, "dropped": 4, "coords": {"dp": 0}}]))
    found = summarise(opened.trace, opened.info)
    facts = dict(found.facts)
    assert facts["Phases"] == "eval 2, init 1"
    assert facts["Records"] == "3 calls, 2 states"
    assert facts["Lost"] == "4 records"
    assert facts["Command"] == "python train.py"
    assert found.functions[0][:2] == ("f", 3)
    assert found.variables == [("torch.nn.Linear", "parameter", 2, "data")]
    assert found.loss == [(0, 3.0), (1, 2.0), (2, 1.0)]


@pytest.mark.parametrize("meta", ["not json", "[1]", '{"loss":"x"}', '{"loss":true}', '{"loss":NaN}', '{"loss":1e999}', '"loss"'])
def test_odd_values_of_a_loss_are_no_curve(tmp_path, meta):
    calls = [{"fn": "f", "step": s, "user_meta": meta} for s in range(3)]
    report = report_of(tmp_path / "r", [{"calls": calls}], [])
    assert 'class="curve"' not in html.render(report)


def test_write_text_replaces_links_and_leaves_nothing_behind(tmp_path):
    (tmp_path / "victim").write_text("keep")
    (tmp_path / "report.html").symlink_to(tmp_path / "victim")
    write_text(tmp_path / "report.html", "new \udc80")
    assert (tmp_path / "victim").read_text() == "keep"
    assert (tmp_path / "report.html").read_text() == "new \\udc80"
    with pytest.raises(OSError, match="No such"):
        write_text(tmp_path / "absent" / "x", "")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html", "victim"]


def test_words():
    assert wording.ranges([3, 1, 2, 7, 7]) == "1–3, 7"
    assert wording.ranges(range(0, 100, 2), limit=2) == "0, 2, …"
    assert wording.count(1, "process", "processes") == "1 process"
    assert wording.count(1200, "rule") == "1,200 rules"
    assert wording.clean("x" * 100, 20) == "x" * 13 + "…" + "x" * 6
    assert wording.clean("a\tb\r\nc\x00\udc80") == "a b  c\\x00\\udc80"
    assert wording.when("phase is train") == "when phase is train"
    assert wording.fold(["a", "b", "c"], 2) == ["a", "b", "and 1 more of this kind"]
