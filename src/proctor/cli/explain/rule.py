"""One rule for a reader: what it says, where it passed and failed side by side, and what separates the two.

`explain/__init__.py` calls it with one rule of a pack. In: the rule, and with `--run` a run directory. Out: text on the terminal; nothing is written.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import Console

    from proctor.invariants.condition import Condition
    from proctor.invariants.invariant import Evidence, Example, Invariant
    from proctor.invariants.pack import Pack
    from proctor.invariants.relations import Relation
    from proctor.invariants.trace import Trace
    from proctor.invariants.verdict import CheckResult

_RUNS: Final = 8  # named of those that support a rule
_VALUE: Final = 60  # characters of a value in a table
_LABEL: Final = 12


def show_rule(rule: Invariant, relation: Relation | None, pack: Pack) -> None:
    """Print the rule and why it is believed."""
    from proctor.invariants.invariant import Tier
    from proctor.verify import wording

    out = _console()
    out.print(wording.clean(rule.text), style="bold", soft_wrap=True)
    code = relation.code if relation is not None else "?"
    hushed = [s for s in pack.suppressions if s.rule == rule.id]
    diverse = rule.diversity
    tier = relation.tier(rule) if relation is not None else Tier.TICKET
    why = f", since it is a {relation.standing_of(rule.hypothesis).value}" if relation is not None else ""
    facts = [
        ("applies", wording.when(rule.precondition.say())),
        ("absent", f"{', '.join(rule.precondition.absent())} (must not be set)" if rule.precondition.absent() else ""),
        ("support", wording.support(rule.support)),
        ("diversity", f"{wording.count(diverse.families, 'kind')} of program" if diverse.families else ""),
        ("runs", _runs(rule, pack)),
        ("false alarms", wording.rate(rule.false_alarm)),
        ("severity", f"{rule.severity.value}; a violation deserves a {tier.value}{why}"),
        ("strangers", wording.record(rule.record) if rule.record is not None else "not held against programs of strangers"),
        *(("suppressed", f"{s.reason}{f', until {s.until}' if s.until else ''}") for s in hushed),
        ("family", f"{code} {rule.relation}"),
        ("id", rule.id),
        *((name, wording.clean(value, 200)) for name, value in rule.hypothesis.params),
    ]
    for label, text in facts:
        if text:
            out.print(f"  {wording.clean(label):<{_LABEL}}  {wording.clean(text)}", soft_wrap=True)
    out.print()
    _evidence(out, rule, rule.evidence, "When it was learned", names=_names(pack))


def show_run(rule: Invariant, relation: Relation, folder: Path) -> None:
    """Evaluate the rule on a run, and print where it held and failed there.

    Raises:
        TraceError: the run cannot be read.
    """
    from proctor.invariants.invariant import Evidence
    from proctor.invariants.pack import Pack
    from proctor.invariants.trace import Trace
    from proctor.verify import wording
    from proctor.verify.checker import check

    trace = Trace.load([folder], lives=True)
    result = check(trace, [Pack([rule])], relations={relation.name: relation})
    out = _console()
    out.print()
    out.print(f"In {wording.clean(folder)}: {_verdict(result)}", style="bold", soft_wrap=True)
    for violation in result.violations:
        facts = (
            ("where", wording.place(violation)),
            ("expected", violation.expected),
            ("seen", violation.seen),
            ("extent", wording.spread(violation)),
            ("to blame", wording.blamed(violation)),
            ("look at", violation.advice),
        )
        for label, text in facts:
            if text:
                out.print(f"  {label:<{_LABEL}}  {wording.clean(text, 600)}", soft_wrap=True)
    for note in result.notes:
        out.print(f"  {'note':<{_LABEL}}  {wording.clean(note, 300)}", soft_wrap=True)
    out.print()
    within, outside = _evaluate(rule, relation, trace)
    learned = not within.passing and bool(rule.evidence.passing)
    if learned:  # what a healthy run does, to compare with
        within = Evidence(rule.evidence.passing, within.failing)
    _evidence(out, rule, within, "Where it applies in this run", {}, "passed, when it was learned" if learned else "passed")
    if outside.failing:
        runs = sum(r.excluded for r in outside.runs)
        out.print()
        out.print(f"Where it does not apply and did not hold: {wording.count(runs, 'example')}, such as", style="bold")
        for example in outside.failing:
            for line in _described(example, {}):
                out.print(f"  {wording.clean(line)}", soft_wrap=True)


def show_next(rule: Invariant, packs: Sequence[str], *, evaluated: bool) -> None:
    """Print what to do next."""
    from proctor.verify import wording

    out = _console()
    named = "".join(f" -i {shlex.quote(p)}" for p in packs)
    sources = sorted({e.source for e in rule.evidence.passing if e.source})
    out.print()
    if sources:
        out.print(f"Look at: {wording.clean(', '.join(sources[:4]), 300)} (healthy code that follows the rule)", soft_wrap=True)
    if not evaluated:
        out.print(f"Next: proctor explain {rule.id}{named} --run RUN", soft_wrap=True)
    pack = shlex.quote(packs[0]) if packs else "PACK"
    out.print(f"{'Next:' if evaluated else '  or:'} proctor pack suppress {pack} {rule.id} --reason TEXT --until DATE", soft_wrap=True)


def _console() -> Console:
    from proctor.verify.report.formats.terminal import console

    return console()


def _verdict(result: CheckResult) -> str:
    if result.violations:
        return "VIOLATED"
    if result.unknown:
        return "UNKNOWN, from what was recorded"
    return "HOLDS" if result.checked else "does not apply: its precondition was never met"


def _evaluate(rule: Invariant, relation: Relation, trace: Trace) -> tuple[Evidence, Evidence]:
    """Examples of a run where the rule applies, and where it does not."""
    from dataclasses import replace

    import polars as pl

    from proctor.infer.evidence import collect
    from proctor.invariants.invariant import Evidence
    from proctor.verify.coverage import coverage

    examples = relation.examples(trace, [rule.hypothesis])
    frame = examples.frame
    if getattr(relation, "absence", False):
        across = bool(getattr(relation, "across_ranks", False))
        runs = [p.run for p in trace.processes]
        frame = coverage(trace).doubt(frame, across_ranks=across, runs=runs, hypotheses=[rule.hypothesis])
    met = rule.precondition.holds(frozenset(frame.columns))
    frame = frame.with_columns(met.fill_null(value=False).alias("_met"))
    parts = [
        collect(relation, trace, [rule.hypothesis], None, replace(examples, frame=frame.filter(side))).get(0, Evidence())
        for side in (pl.col("_met"), ~pl.col("_met"))
    ]
    return parts[0], parts[1]


def _evidence(
    out: Console, rule: Invariant, evidence: Evidence, heading: str, names: dict[str, str], passed: str = "passed"
) -> None:
    from rich.table import Table
    from rich.text import Text

    from proctor.verify import wording

    if not evidence.passing and not evidence.failing:
        out.print(f"{heading}: no examples were kept", style="dim", soft_wrap=True)
        return
    sides = {name: side for name, side in ((passed, evidence.passing), ("failed", evidence.failing)) if side}
    table = Table(*sides, title=heading, title_justify="left", title_style="bold", show_lines=True)
    for i in range(max(map(len, sides.values()))):
        texts = ("\n".join(map(wording.clean, _described(side[i], names))) if i < len(side) else "" for side in sides.values())
        table.add_row(*map(Text, texts))
    out.print(table)
    _circumstances(out, rule, evidence)


def _circumstances(out: Console, rule: Invariant, evidence: Evidence) -> None:
    """The fields of both sides, and which condition separates them."""
    from rich.table import Table
    from rich.text import Text

    from proctor.infer.evidence import separating
    from proctor.invariants.condition import AGREE, Kind
    from proctor.verify import wording

    apart = separating(evidence.passing, evidence.failing)
    conditions: dict[str, list[Condition]] = {}
    for condition in dict.fromkeys(c for clause in rule.precondition.any_of for c in clause):
        conditions.setdefault(condition.field, []).append(condition)
    agreeing = {f for f, cs in conditions.items() if any(c.kind in (Kind.CONSISTENT, Kind.UNEQUAL) for c in cs)}
    names = sorted({k for e in (*evidence.passing, *evidence.failing) for k, _ in e.fields}, key=lambda k: (k not in apart, k))
    names = [n for n in names if not n.endswith(AGREE) or n in apart or n.removesuffix(AGREE) in agreeing]
    if not names:
        return
    table = Table("circumstance", "where it passed", "where it failed", "", title_justify="left")
    for name in names:
        field = name.removesuffix(AGREE)
        label = f"{field} is the same" if name.endswith(AGREE) else name
        mark = ""
        if name in apart:
            mark = "separates: a condition" if field in conditions else "differs"
        elif field in conditions:
            mark = "a condition"
        style = "bold" if name in apart and field in conditions else ""
        cells = (label, _values(name, evidence.passing), _values(name, evidence.failing), mark)
        table.add_row(*(Text(wording.clean(cell), style=style) for cell in cells))
    out.print(table)
    fields = [f for f in dict.fromkeys(n.removesuffix(AGREE) for n in apart) if f in conditions]
    decisive = [" or ".join(c.say() for c in conditions[f]) for f in fields]
    if decisive:
        out.print(f"What separates them: {wording.clean('; '.join(decisive), 400)}", soft_wrap=True)
    elif not evidence.failing and conditions:
        out.print("It never failed: the conditions only say in what kind of program it was seen.", soft_wrap=True)


def _values(name: str, examples: Sequence[Example]) -> str:
    from proctor.verify import wording

    said = sorted({dict(e.fields).get(name, "not set") or "none" for e in examples})
    return ", ".join(wording.clean(v, _VALUE) for v in said)


def _described(example: Example, names: dict[str, str]) -> list[str]:
    from proctor.verify import wording

    run = names.get(example.run, "")
    who = f"{example.program} ({run})" if run else example.program
    lines = [f"{who}, {wording.at_step(example.step)}, rank {example.rank}", example.where, example.source]
    if example.seen:
        lines += [f"expected: {example.expected}", f"seen: {example.seen}"]
    elif example.expected:
        lines.append(f"as expected: {example.expected}")
    return [line for line in lines if line]


def _runs(rule: Invariant, pack: Pack) -> str:
    """`vae.py: vae-seed0, vae-seed1; gan.py: gan-seed0; and 4 more`."""
    known = {s.id: s for s in pack.provenance.sources}
    found = [known[r.run] for r in rule.evidence.runs if r.passed and r.run in known]
    found.sort(key=lambda s: (s.program, s.name))
    programs: dict[str, list[str]] = {}
    for source in found[:_RUNS]:
        programs.setdefault(source.program, []).append(source.name or source.id)
    text = "; ".join(f"{program}: {', '.join(runs)}" for program, runs in programs.items())
    return text + (f"; and {len(found) - _RUNS:,} more" if len(found) > _RUNS else "")


def _names(pack: Pack) -> dict[str, str]:
    return {s.id: s.name for s in pack.provenance.sources}
