"""The report on a terminal: the verdict first, then each incident with what to look at, readable without colour.

`proctor check` and `report` call it; the oracle and the pack commands take its `console`. In: a `Report`. Out: text, with colour where the terminal has it.
"""

from __future__ import annotations

import io
import os
import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from proctor.invariants.invariant import Severity
from proctor.invariants.verdict import CheckResult, Incident, Violation
from proctor.verify import wording
from proctor.verify.report import Report
from proctor.verify.report.summary import Summary

if TYPE_CHECKING:
    from rich.console import Console

MORE: Final = 8  # further violations of one incident, one line each
_STYLE: Final = {
    Severity.CRITICAL: "bold red",
    Severity.ERROR: "bold red",
    Severity.WARNING: "bold yellow",
    Severity.INFO: "bold cyan",
}
_PLAIN_WIDTH: Final = 110  # of a pipe or file, where no terminal says otherwise
_LABEL: Final = 12  # columns for the label of a fact


def render(report: Report) -> str:
    """The report as plain text."""
    out = io.StringIO()
    show(report, console(out))
    return out.getvalue()


def console(file: io.StringIO | None = None) -> Console:
    """A console that takes text literally: names in a record are no markup."""
    from rich.console import Console

    plain = file is not None
    made = Console(file=file, markup=False, highlight=False, emoji=False, force_terminal=False if plain else None)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = _PLAIN_WIDTH
    return made


def show(report: Report, to: Console) -> None:
    """Print a check."""
    from rich.text import Text

    result = report.result
    if result is None:
        to.print("PROCTOR  not checked against any rule yet")
    else:
        word = wording.state(result, report.exit_code)
        style = {"violated": "bold red", "clean": "bold green"}.get(word, "bold yellow")
        line = Text("PROCTOR", style="bold").append("  ")
        line.append("INCONCLUSIVE, " if word == "inconclusive" else "", style=style)
        to.print(line.append(wording.tally(result), style=style))
        to.print(Text(wording.clean(result.run), style="dim"), soft_wrap=True)
        for incident in result.incidents:
            _incident(incident, report, to)
    _silenced(report, to)
    _unchecked(report, to)
    _next(report, to)


def show_summary(summary: Summary, run: str, to: Console) -> None:
    """Print what a run is."""
    from rich.text import Text

    to.print(Text("PROCTOR", style="bold").append(f"  run {wording.clean(run)}"), soft_wrap=True)
    for label, text in summary.facts:
        _fact(to, label, text)
    tables: tuple[tuple[str, list[tuple[str, str]]], ...] = (
        ("Most called", [(f"{n:>10,}", f"{name}  {s:.2f} s") for name, n, s in summary.functions[:8]]),
        (
            "Tracked",
            [(f"{n:>10,}", f"{'tensor' if n == 1 else 'tensors'} in {m} ({r}: {a})") for m, r, n, a in summary.variables[:8]],
        ),
    )
    for heading, rows in tables:
        if rows:
            to.print()
            to.print(Text(heading, style="bold"))
            for number, text in rows:
                _fact(to, number, text)


def _incident(incident: Incident, report: Report, to: Console) -> None:
    from rich.text import Text

    first = incident.violations[0]
    to.print()
    to.print(
        Text(first.severity.value.upper(), style=_STYLE[first.severity])
        .append("  ")
        .append(wording.clean(incident.title), style="bold")
    )
    for label, text in facts(first):
        _fact(to, label, text)
    rest = incident.violations[1:]
    shown = rest if report.everything else rest[:MORE]
    if shown:
        _fact(to, "also broken", "")
    for violation in shown:
        _fact(to, violation.code, f"{wording.clean(violation.text)} ({wording.at_step(violation.step)}, {wording.at_rank(violation.rank)})")
    if len(rest) > len(shown):
        _fact(to, "", f"+{len(rest) - len(shown):,} more: --all")


def facts(v: Violation) -> list[tuple[str, str]]:
    """Label and text of one violation, in reading order."""
    rows = (
        ("where", wording.place(v)),
        ("rule", f"{v.text}  [{v.code} {v.relation}, {v.id}]"),
        ("applies", wording.when(v.when)),
        ("expected", v.expected),
        ("seen", v.seen),
        ("extent", wording.spread(v)),
        ("support", wording.support(v.support)),
        ("false alarms", wording.rate(v.false_alarm) if v.false_alarm is not None else ""),
        ("held at", wording.held(v.held[0]) if v.held else ""),
        ("to blame", wording.blamed(v)),
        ("look at", v.advice),
    )
    return [(label, wording.clean(text, 600)) for label, text in rows if text]


def _fact(to: Console, label: str, text: str) -> None:
    """A label and its text; what does not fit is wrapped under the text."""
    _hang(to, f"  {label:<{_LABEL}}  ", text)


def _hang(to: Console, lead: str, text: str) -> None:
    from rich.text import Text

    width = max(20, to.width - len(lead))
    for i, line in enumerate(Text(text).wrap(to, width, overflow="fold") or [Text("")]):
        line.rstrip()
        start = Text(lead if i == 0 else " " * len(lead), style="dim")
        to.print(start.append_text(line) if line else Text(start.plain.rstrip(), style="dim"), soft_wrap=True)


def _silenced(report: Report, to: Console) -> None:
    from rich.text import Text

    hushed = report.result.silenced if report.result is not None else []
    if not hushed:
        return
    to.print()
    to.print(Text("Not reported", style="bold"))
    shown = hushed if report.everything else hushed[:MORE]
    for silenced in shown:
        _hang(to, "  - ", wording.clean(wording.hushed(silenced), 600))
    if len(hushed) > len(shown):
        _hang(to, "  ", f"+{len(hushed) - len(shown):,} more: --all")


def _unchecked(report: Report, to: Console) -> None:
    from rich.text import Text

    rows = [wording.clean(n, 400) for n in unchecked(report.result)]
    if rows:
        to.print()
        to.print(Text("Not checked", style="bold"))
        for row in rows:
            _hang(to, "  - ", row)


def unchecked(result: CheckResult | None) -> list[str]:
    """What a check could not look at, one sentence each."""
    if result is None:
        return []
    rows = []
    if not result.checked:
        rows.append("no rule could be checked on this run: these rules may be of another kind of program")
    if result.not_triggered:
        noun = "rule does" if result.not_triggered == 1 else "rules do"
        rows.append(f"{result.not_triggered:,} {noun} not apply: nothing that they speak of occurred in this run")
    if result.unknown:
        noun = "rule" if result.unknown == 1 else "rules"
        rows.append(f"{result.unknown:,} {noun} could not be decided from what was recorded")
    return rows + list(result.notes)


def _next(report: Report, to: Console) -> None:
    from rich.text import Text

    rows: list[str] = []
    result = report.result
    if result is not None and result.incidents:
        packs = "".join(f" -i {shlex.quote(p)}" for p in report.packs)
        rows.append(f"proctor explain {result.incidents[0].violations[0].id}{packs}")
    elif result is not None and not result.checked:
        rows.append("proctor infer RUN… -o PACK   (learn rules from healthy runs of this program)")
    elif result is None:
        rows.append("proctor check RUN -i PACK")
    if report.page:
        rows.append(f"open {shlex.quote(report.page)}")
    if rows:
        to.print()
        wide: Callable[[str], None] = lambda line: to.print(Text(wording.clean(line)), soft_wrap=True)  # noqa: E731
        wide(f"Next: {rows[0]}")
        for row in rows[1:]:
            wide(f"      {row}")
