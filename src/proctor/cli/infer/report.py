"""What `proctor infer` says: what it read, what it learned, and what it did not."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from proctor.infer.engine import Report
    from proctor.invariants.invariant import Invariant

_EXAMPLES = 3  # rules shown of each relation


def say_runs(report: Report, *, repeated: int) -> None:
    """What was learned from, on standard error."""
    runs = report.runs
    records = {"calls": sum(r.calls for r in runs), "states": sum(r.states for r in runs), "values": sum(r.values for r in runs)}
    size = ", ".join(f"{n:,} {what}" for what, n in records.items() if n or what != "values")
    processes = sum(r.processes for r in runs)
    who = f"{_count(len(runs), 'run')}, {_count(len({r.program for r in runs}), 'program')}, {_count(processes, 'process', 'processes')}"
    print(f"learned from {who}: {size}", file=sys.stderr)
    if report.reused:
        print(f"{_count(report.reused, 'part')} reused", file=sys.stderr)
    if repeated:
        print(f"note: {_count(repeated, 'run')} given more than once, read once", file=sys.stderr)
    for note in (note for r in runs for note in r.notes):
        print(f"note: {note}", file=sys.stderr)


def say_rules(rules: Sequence[Invariant], report: Report, pack: Path) -> None:
    """What was learned, on standard output."""
    from rich.console import Console
    from rich.text import Text

    # A file or a pipe is not cut at 80 columns: there a sentence stays one line.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 1000)
    _say_table(console, report)
    for tally in report.tallies:
        ours = sorted((rule for rule in rules if rule.relation == tally.relation), key=_weight)
        if ours:
            shown = f"{min(_EXAMPLES, len(ours))} of {_count(len(ours), 'rule')}"
            console.print(Text(f"\n{tally.relation}, {shown}:", style="bold"))
        for rule in ours[:_EXAMPLES]:
            _say_rule(console, rule)
    if report.dropped:
        console.print("\nNot learned:")
        for why, count in report.dropped.items():
            console.print(Text(f"  {count:>9,}  {why}"))
    if not rules:
        console.print("\nNothing was learned, so no pack was written. Record more steps, or more runs.")
        return
    if len(report.runs) == 1:
        console.print(
            "\nAll rules come from one run; more runs make rules more general and fewer of them wrong."
        )
    console.print(Text(f"\n{_count(len(rules), 'rule')} in {pack}"), soft_wrap=True)
    console.print(Text(f"next: proctor check RUN -i {pack}"), soft_wrap=True)


def _say_table(console: Console, report: Report) -> None:
    from rich.table import Table

    table = Table("relation", box=None, pad_edge=False, header_style="bold")
    for heading in ("hypotheses", "examples", "rules", "always", "conditional", "seconds"):
        table.add_column(heading, justify="right")
    for t in report.tallies:
        if not t.hypotheses and not t.error:
            continue  # it has nothing to say of these runs
        counts = (t.hypotheses, t.examples, t.rules, t.unconditional, t.conditional)
        name = f"{t.relation} (failed)" if t.error else t.relation
        table.add_row(name, *(f"{n:,}" for n in counts), f"{t.seconds:.1f}")
    console.print(table)


def _say_rule(console: Console, rule: Invariant) -> None:
    from rich.padding import Padding
    from rich.text import Text

    support = rule.support
    seen = f"passed {_count(support.passed, 'time')} in {_count(support.runs, 'run')} of {_count(support.programs, 'program')}"
    if support.excluded:
        seen += f"; the condition explains {_count(support.excluded, 'failure')}"
    said = rule.precondition.say()
    when = said if said == "always" else f"when {said}"
    lines = [(2, rule.text, ""), (6, when, ""), (6, f"{seen}  [{rule.id}]", "dim")]
    for indent, text, style in lines:
        console.print(Padding(Text(text, style=style), (0, 0, 0, indent), expand=False))


def _weight(rule: Invariant) -> tuple[int, int, int, str]:
    """Best supported first."""
    support = rule.support
    return -support.programs, -support.runs, -support.passed, rule.id


def _count(n: int, noun: str, plural: str = "") -> str:
    return f"{n:,} {noun if n == 1 else plural or noun + 's'}"
