"""The comparison on a terminal: the verdict first, then the first wrong tensor and what to look at, readable without colour."""

from __future__ import annotations

import io
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from proctor.oracle.judging.verdicts import FAILING, Culprit, TensorVerdict
from proctor.oracle.report import Report
from proctor.oracle.report._wording import (
    by_weight,
    clean,
    conflict,
    count,
    error,
    kind,
    module,
    multiple,
    number,
    rank_list,
    short_kind,
    when,
)
from proctor.verify.report.formats.terminal import console

if TYPE_CHECKING:
    from rich.console import Console

WORST: Final = 15
CONFLICTS: Final = 8
NOTES: Final = 8
_STYLE: Final = {"different": "bold red", "equivalent": "bold green", "inconclusive": "bold yellow"}


def render(report: Report) -> str:
    """The report as plain text."""
    out = io.StringIO()
    show(report, console(out))
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def show(report: Report, to: Console) -> None:
    """Print a comparison."""
    from rich.text import Text

    verdict = report.verdict
    style = _STYLE[verdict.verdict]
    to.print(Text("PROCTOR ORACLE", style="bold").append("  ").append(verdict.verdict.upper(), style=style))
    if verdict.reason:
        _hang(to, "  ", verdict.reason)
    sides = [(f"{label:<9}  ", path) for label, path in (("reference", report.reference), ("candidate", report.candidate)) if path]
    for lead, path in sides:
        more = f"  ({', '.join(x for x in (count(report.world, 'rank') if report.world else '', report.mesh) if x)})" if lead.startswith("cand") else ""
        to.print(Text(f"  {lead}{clean(path, 300)}{clean(more if more != '  ()' else '', 200)}", style="dim"), soft_wrap=True)
    _proof(report, to)
    if verdict.culprit is not None:
        _culprit(verdict.culprit, to)
    if verdict.first is not None:
        _first(verdict.first, to)
    _replicas(report, to)
    _worst(report, to)
    _list(to, "Not checked", verdict.unchecked, report.everything)
    _list(to, "Notes", verdict.notes, report.everything)
    _next(report, to)


def _proof(report: Report, to: Console) -> None:
    """Beside the comparison of one run's numbers: what is said for all data."""
    from rich.text import Text

    found = report.proof
    if found is None:
        return
    style = {"PROVED": "bold green", "EQUAL": "bold green", "DIFFERENT": "bold red"}.get(found.verdict, "bold yellow")
    to.print()
    to.print(Text("FOR ALL DATA", style="bold").append(f"  {found.verdict}", style=style))
    for label, text in (("why", found.why), ("where", found.where), *(("holds for", text) for text in found.holds)):
        if text:
            _hang(to, f"  {label:<11}", clean(text, 600))


def _culprit(found: Culprit, to: Console) -> None:
    from rich.text import Text

    to.print()
    to.print(Text("CULPRIT", style="bold red").append(f"  {clean(found.module or 'the model itself', 200)}", style="bold"), soft_wrap=True)
    rows = [("side", found.direction), ("where", found.source), ("why", found.text), ("op", getattr(found, "operation", ""))]
    for label, text in rows:
        if text:
            _hang(to, f"  {label:<8}", clean(text, 600))


def _first(tensor: TensorVerdict, to: Console) -> None:
    from rich.text import Text

    to.print()
    to.print(Text("FIRST WRONG TENSOR", style="bold red").append(f"  {clean(tensor.name, 200)}", style="bold"), soft_wrap=True)
    place = module(tensor)
    rows = [
        ("what", f"{kind(tensor)}, {when(tensor)}"),
        ("module", f"{place or 'the model itself'}{f' ({tensor.cls})' if tensor.cls else ''}" if tensor.kind != "scalar" else ""),
        ("where", tensor.source),
        ("error", error(tensor)),
        ("how", tensor.note if tensor.note != error(tensor) else ""),
        ("held by", f"{rank_list(tensor.ranks)}{f', {tensor.layout}' if tensor.layout else ''}" if tensor.ranks or tensor.layout else ""),
    ]
    for label, text in rows:
        if text:
            _hang(to, f"  {label:<8}", clean(text, 600))


def _replicas(report: Report, to: Console) -> None:
    from rich.text import Text

    found = report.verdict.replicas
    if not found:
        return
    to.print()
    to.print(Text("REPLICAS DIFFER", style="bold red"))
    shown = found if report.everything else found[:CONFLICTS]
    for item in shown:
        by = f", by {number(item.rel_err)}" if item.rel_err else ""
        _hang(to, "  - ", clean(f"{item.name} ({kind(item)}, {when(item)}): {conflict(item)}{by}", 400))
        if item.note:
            _hang(to, "    ", clean(item.note, 300))
    if len(found) > len(shown):
        _hang(to, "  ", f"+{len(found) - len(shown):,} more: --all")


def _worst(report: Report, to: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    rows = [t for t in by_weight(report.verdict.tensors) if t.verdict in FAILING or t.verdict == "warn"]
    if not rows:
        return
    wrong = sum(t.verdict in FAILING for t in rows)
    shown = rows if report.everything else rows[:WORST]
    to.print()
    title = f"Wrong, in the order of the dataflow ({wrong:,})" if wrong else f"Close to the tolerance ({len(rows):,})"
    to.print(Text(title, style="bold"))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
    table.add_column("  error", justify="right", no_wrap=True)
    table.add_column("of norm", justify="right", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("tensor", overflow="fold", ratio=5)
    table.add_column("in what way", overflow="fold", ratio=4)
    for t in shown:
        style = "red" if t.verdict in FAILING else "yellow"
        word = multiple(t.ratio) if t.verdict in ("bad", "warn") else t.verdict
        table.add_row(
            Text(f"  {word}", style=style),
            number(t.rel_err) if t.verdict in ("bad", "warn") else "",
            str(t.step),
            Text(clean(f"{t.name}  {short_kind(t)}", 200)),
            Text(clean(t.note, 160)),
        )
    to.print(table)
    if len(rows) > len(shown):
        _hang(to, "  ", f"+{len(rows) - len(shown):,} more: --all")


def _list(to: Console, title: str, rows: Sequence[str], everything: bool) -> None:
    from rich.text import Text

    if not rows:
        return
    to.print()
    to.print(Text(title, style="bold"))
    shown = rows if everything else rows[:NOTES]
    for row in shown:
        _hang(to, "  - ", clean(row, 400))
    if len(rows) > len(shown):
        _hang(to, "  ", f"+{len(rows) - len(shown):,} more: --all")


def _next(report: Report, to: Console) -> None:
    from rich.text import Text

    rows = list(report.next_steps)
    if report.page:
        rows.append(f"open {shlex.quote(report.page)}")
    for i, row in enumerate(rows):
        if i == 0:
            to.print()
        to.print(Text(clean(f"{'Next: ' if i == 0 else '      '}{row}")), soft_wrap=True)


def _hang(to: Console, lead: str, text: str) -> None:
    """Text after a label; what does not fit is wrapped under the text."""
    from rich.text import Text

    width = max(20, to.width - len(lead))
    for i, line in enumerate(Text(clean(text)).wrap(to, width, overflow="fold") or [Text("")]):
        line.rstrip()
        to.print(Text(lead if i == 0 else " " * len(lead), style="dim").append_text(line), soft_wrap=True)
