"""The check on a terminal, as JSON, and as one page."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from proctor.oracle.report._wording import clean
from proctor.oracle.selfcheck.outcomes import Outcome, SelfReport
from proctor.verify import report as shared  # its style sheet
from proctor.verify.report.formats.terminal import console

if TYPE_CHECKING:
    from rich.console import Console

_STYLE: Final = {"different": "bold red", "equivalent": "bold green", "inconclusive": "bold yellow"}
_TONE: Final = {"different": "violated", "equivalent": "clean", "inconclusive": "inconclusive"}


def as_json(report: SelfReport) -> str:
    """One object, schema 1; scripts depend on it."""
    content = {**msgspec.to_builtins(report), "outcomes": [msgspec.to_builtins(o) for o in report.outcomes]}
    return msgspec.json.format(msgspec.json.encode(content), indent=2).decode() + "\n"


def as_text(report: SelfReport) -> str:
    """Plain text, readable without colour."""
    out = io.StringIO()
    _show(report, console(out))
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def _show(report: SelfReport, to: Console) -> None:
    from rich.text import Text

    to.print(Text("PROCTOR SELF", style="bold").append("  ").append(report.verdict.upper(), style=_STYLE[report.verdict]))
    to.print(f"  {report.reason}", soft_wrap=True, highlight=False, markup=False)
    for outcome in _of(report, "different"):
        to.print()
        to.print(Text("BROKEN", style="bold red").append(f"  {outcome.relation}", style="bold").append(f"  {clean(outcome.claim, 200)}"), soft_wrap=True)
        rows = [
            ("of", outcome.subject), ("what", outcome.reason), ("expected", outcome.expected), ("seen", outcome.seen),
            ("culprit", str(outcome.culprit) if outcome.culprit else ""), ("next", outcome.advice),
        ]  # fmt: skip
        for label, text in rows:
            if text:
                to.print(f"  {label:<9} {clean(text, 500)}", soft_wrap=True, highlight=False, markup=False)
    for title, words in (("Differs by design", ("by-design",)), ("Holds", ("equivalent",)), ("Not checked", ("inconclusive",)), ("Does not apply", ("not-applicable",))):
        found = [o for o in report.outcomes if o.verdict in words]
        if found:
            to.print()
            to.print(Text(title, style="bold"))
        for outcome in found:
            where = f" [{outcome.culprit}]" if outcome.culprit and outcome.verdict == "by-design" else ""
            of = f" ({clean(outcome.subject, 60)})" if outcome.subject and outcome.verdict != "not-applicable" else ""
            to.print(f"  {outcome.relation:<14}{of} {clean(outcome.reason, 300)}{clean(where, 200)}", soft_wrap=True, highlight=False, markup=False)
    for note in report.notes:
        to.print(f"  note: {clean(note, 300)}", soft_wrap=True, highlight=False, markup=False)


def _of(report: SelfReport, verdict: str) -> Sequence[Outcome]:
    return [o for o in report.outcomes if o.verdict == verdict]


def as_html(report: SelfReport) -> str:
    """One self-contained page; everything from the program is escaped."""
    style = Path(shared.__file__).with_name("templates").joinpath("page.css").read_text(encoding="utf-8")

    def escape(text: str) -> str:
        return html.escape(clean(text, 500))

    rows = "".join(
        f"<tr class='{o.verdict}'><td>{escape(o.relation)}</td><td>{escape(o.verdict)}</td><td>{escape(o.subject)}</td>"
        f"<td>{escape(o.reason)}</td><td>{escape(str(o.culprit or ''))}</td><td>{escape(o.advice)}</td></tr>"
        for o in report.outcomes
    )
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>proctor self: {report.verdict}</title><style>{style} td {{vertical-align: top; padding: .3em .6em}}</style></head>"
        f"<body class='{_TONE[report.verdict]}'><main><h1>{report.verdict.capitalize()}</h1><p>{escape(report.reason)}</p><p><code>{escape(report.command)}</code></p>"
        f"<table><thead><tr><th>relation</th><th>verdict</th><th>of</th><th>what</th><th>culprit</th><th>next</th></tr></thead><tbody>{rows}</tbody></table>"
        f"<ul>{''.join(f'<li>{escape(n)}</li>' for n in report.notes)}</ul></main></body></html>\n"
    )
