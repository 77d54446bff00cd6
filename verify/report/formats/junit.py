"""JUnit XML, for CI: one failing test case a violated rule; what held and what was not judged as one case each."""

from __future__ import annotations

from xml.etree import ElementTree as ET

from proctor.invariants.verdict import CheckResult, Violation
from proctor.verify import wording
from proctor.verify.report import Report


def render(report: Report) -> str:
    """One test suite."""
    result = report.result or CheckResult("", [], 0, 0, 0, [], 0, 0)
    suite = ET.Element("testsuite", name="proctor")
    for violation in result.violations:
        _failure(suite, violation)
    held = result.checked - len(result.violations) - len(result.silenced)
    if held > 0:
        ET.SubElement(suite, "testcase", classname="proctor", name=f"{wording.count(held, 'rule')} held")
    for silenced in result.silenced:
        name = wording.clean(f"{silenced.violation.text} [{silenced.violation.id}]")
        case = ET.SubElement(suite, "testcase", classname=f"proctor.{silenced.violation.relation}", name=name)
        ET.SubElement(case, "skipped", message=wording.clean(wording.hushed(silenced)))
    for n, why in ((result.not_triggered, "not triggered"), (result.unknown, "could not be decided")):
        if n:
            case = ET.SubElement(suite, "testcase", classname="proctor", name=f"{wording.count(n, 'rule')} {why}")
            ET.SubElement(case, "skipped", message=why)
    if report.exit_code == wording.EXIT_INCONCLUSIVE:
        case = ET.SubElement(suite, "testcase", classname="proctor", name="the run can be judged")
        ET.SubElement(case, "error", type="inconclusive", message="nothing was checked, or a rank is missing")
    if result.notes:
        ET.SubElement(suite, "system-out").text = "\n".join(wording.clean(n) for n in result.notes)
    cases = suite.findall("testcase")
    for key, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(key, str(sum(1 for c in cases if c.find(tag) is not None)))
    suite.set("tests", str(len(cases)))
    root = ET.Element("testsuites", name="proctor")
    root.append(suite)
    ET.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _failure(suite: ET.Element, v: Violation) -> None:
    name = wording.clean(f"{v.text} [{v.id}]")
    case = ET.SubElement(suite, "testcase", classname=f"proctor.{v.relation}", name=name)
    file, _, line = v.source.rpartition(":")
    if file and line.isdecimal():
        case.set("file", wording.clean(file))
        case.set("line", line)
    failure = ET.SubElement(case, "failure", type=v.code, message=wording.clean(v.seen))
    rows = (
        ("where", wording.place(v)),
        ("applies", wording.when(v.when)),
        ("expected", v.expected),
        ("seen", v.seen),
        ("extent", wording.spread(v)),
        ("support", wording.support(v.support)),
        ("to blame", wording.blamed(v)),
        ("look at", v.advice),
    )
    failure.text = "\n".join(f"{k}: {wording.clean(text)}" for k, text in rows if text)
