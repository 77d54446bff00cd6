"""The rules of a pack in English."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from proctor.invariants.invariant import Invariant
    from proctor.invariants.pack import Pack

SHOWN: Final = 50  # rules, without --all


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("file", metavar="PACK")
    parser.add_argument("--relation", metavar="NAME", help="only rules of this family")
    parser.add_argument("--tier", choices=("page", "ticket"), help="only rules of this tier")
    parser.add_argument("--all", action="store_true", dest="everything", help=f"more than the first {SHOWN}")


def run(args: argparse.Namespace) -> int:
    """Print the pack, family by family, the best supported rules first."""
    from proctor.invariants.invariant import Tier
    from proctor.invariants.pack import read_pack
    from proctor.invariants.relations import registry
    from proctor.verify import wording
    from proctor.verify.report.formats.terminal import console

    out = console()
    path = Path(args.file)
    pack = read_pack(path)
    out.print(f"{wording.clean(path)}: {wording.count(len(pack.invariants), 'rule')}", style="bold", soft_wrap=True)
    for line in _origin(pack):
        out.print(f"  {line}", soft_wrap=True)
    known = registry()
    tiers = {r.id: known[r.relation].tier(r) if r.relation in known else Tier.TICKET for r in pack.invariants}
    rules = [r for r in pack.invariants if args.relation in (None, r.relation) and args.tier in (None, tiers[r.id])]
    rules.sort(key=lambda r: (r.relation, -r.support.programs, -r.support.passed, r.id))
    limit = sys.maxsize if args.everything else SHOWN
    hushed = {s.rule: s for s in pack.suppressions}
    for i, rule in enumerate(rules[:limit]):
        if i == 0 or rules[i - 1].relation != rule.relation:
            out.print()
            out.print(wording.clean(rule.relation), style="bold")
        suppressed = ", suppressed" if rule.id in hushed else ""
        page = ", page" if tiers[rule.id] == "page" else ""
        level = f"[{rule.severity.value}{page}{suppressed}]"
        out.print(f"  {wording.clean(rule.id)}  {level} {wording.clean(rule.text)}", soft_wrap=True)
        out.print(f"                {_facts(rule)}", style="dim", soft_wrap=True)
    if len(rules) > limit:
        out.print(f"\n+{len(rules) - limit:,} more: --all")
    return 0


def _facts(rule: Invariant) -> str:
    from proctor.verify import wording

    facts = [wording.clean(wording.when(rule.precondition.say()), 300), wording.support(rule.support)]
    if rule.false_alarm is not None:
        facts.append(f"false alarms: {wording.rate(rule.false_alarm)}")
    if rule.record is not None:
        facts.append(f"strangers' programs: {wording.record(rule.record)}")
    return "; ".join(facts)


def _origin(pack: Pack) -> list[str]:
    from proctor.verify import wording

    origin = pack.provenance
    programs = wording.clean(", ".join(origin.programs) or "unknown programs", 200)
    tool, torch = wording.clean(origin.tool or "unknown tool"), wording.clean(origin.torch or "unknown")
    lines = [
        f"learned from {wording.count(origin.runs, 'run')} of {programs}"
        f" ({wording.count(origin.records, 'record')}; {tool}, torch {torch})"
    ]
    libraries = ", ".join(f"{k} {v}".strip() for k, v in origin.libraries.items())
    wanted = ", ".join(f"{k}{v}" for k, v in sorted(pack.requires.items()))
    facts = (
        ("libraries", libraries),
        ("for", wanted),
        ("false alarms", wording.measured(origin.measured) if origin.measured is not None else ""),
        ("made", " by ".join(t for t in (origin.made, origin.command) if t)),
        ("note", origin.note),
        ("suppressed", wording.count(len(pack.suppressions), "rule") if pack.suppressions else ""),
        ("withdrawn", wording.count(len(pack.withdrawn), "rule") if pack.withdrawn else ""),
    )
    return lines + [f"{label}: {wording.clean(text, 400)}" for label, text in facts if text]
