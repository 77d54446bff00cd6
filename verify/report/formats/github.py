"""Workflow commands of GitHub Actions: one annotation an incident, at the user's source line, and what was not checked.

A runner shows ten errors and ten warnings a step, so incidents come first, then the other violated rules.
"""

from __future__ import annotations

from typing import Final

from proctor.invariants.invariant import Severity
from proctor.invariants.verdict import CheckResult, Violation
from proctor.verify import wording
from proctor.verify.report import Report
from proctor.verify.report.formats.terminal import unchecked

MAX_ANNOTATIONS: Final = 50
_COMMAND: Final = {
    Severity.CRITICAL: "error",
    Severity.ERROR: "error",
    Severity.WARNING: "warning",
    Severity.INFO: "notice",
}


def render(report: Report) -> str:
    """One command a line."""
    result = report.result or CheckResult("", [], 0, 0, 0, [], 0, 0)
    lines = [_annotation(i.violations[0], i.title, len(i.violations) - 1) for i in result.incidents]
    lines += [_annotation(v, v.text) for i in result.incidents for v in i.violations[1:]]
    hidden = max(0, len(lines) - MAX_ANNOTATIONS)
    lines = lines[:MAX_ANNOTATIONS]
    if hidden:
        lines.append(_command("notice", {"title": "Proctor"}, f"{wording.count(hidden, 'more violated rule')} in the report"))
    if report.exit_code == wording.EXIT_INCONCLUSIVE:
        lines.append(_command("warning", {"title": "Proctor: inconclusive"}, wording.tally(result) if report.result else "not checked"))
    notes = unchecked(report.result)
    if notes:
        lines.append(_command("notice", {"title": "Proctor: not checked"}, "\n".join(wording.clean(n, 300) for n in notes[:20])))
    summary = wording.tally(result) if report.result is not None else "not checked against any rule yet"
    return "".join(f"{line}\n" for line in [*lines, f"Proctor: {wording.clean(summary)}"])


def _annotation(v: Violation, title: str, beside: int = 0) -> str:
    rows = (
        ("rule", v.text),
        ("where", wording.place(v)),
        ("expected", v.expected),
        ("seen", v.seen),
        ("to blame", wording.blamed(v)),
        ("look at", v.advice),
        ("also broken", wording.count(beside, "rule") if beside else ""),
        ("more", f"proctor explain {v.id}"),
    )
    text = "\n".join(f"{label}: {wording.clean(said, 400)}" for label, said in rows if said)
    properties = {"title": f"{wording.clean(v.code)} {wording.clean(title, 200)}"}
    file, _, line = v.source.rpartition(":")
    if file and line.isdecimal():
        properties = {"file": wording.clean(file), "line": str(max(1, int(line[:9]))), **properties}
    return _command(_COMMAND[v.severity], properties, text)


def _command(name: str, properties: dict[str, str], text: str) -> str:
    said = ",".join(f"{key}={_escape(value, inside=True)}" for key, value in properties.items())
    return f"::{name} {said}::{_escape(text)}"


def _escape(text: str, *, inside: bool = False) -> str:
    """As the runner's toolkit does: a value cannot end the property or the command that it is in."""
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if inside else text
