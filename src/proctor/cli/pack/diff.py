"""What changed from one pack to another: rules that came, went, or changed.

exit code: 0 the same rules, 1 they differ, 2 bad usage or input
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from proctor.invariants.invariant import Invariant
    from proctor.invariants.pack import Pack

_LISTED: Final = 50  # rules of one kind, without --all


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("old", metavar="A")
    parser.add_argument("new", metavar="B")
    parser.add_argument("--format", choices=("terminal", "json"), default="terminal", help="default: terminal")
    parser.add_argument("--all", action="store_true", dest="everything", help=f"more than {_LISTED} rules of a kind")


def run(args: argparse.Namespace) -> int:
    """Compare and print; 1 when the packs differ."""
    from proctor.invariants.pack import read_pack

    found = compare(read_pack(Path(args.old)), read_pack(Path(args.new)))
    if args.format == "json":
        print(json.dumps(found))
    else:
        _print(found, None if args.everything else _LISTED)
    return 1 if any(found.values()) else 0


def compare(old: Pack, new: Pack) -> dict[str, list[dict[str, Any]]]:
    """Rules that were added, removed, changed, by id; a rule whose precondition changed is one rule that changed."""
    from proctor.invariants.invariant import hypothesis_id

    before, after = ({r.id: r for r in p.invariants} for p in (old, new))
    gone = [r for i, r in before.items() if i not in after]
    came = [r for i, r in after.items() if i not in before]
    changed: list[dict[str, Any]] = []
    for rule_id in sorted(before.keys() & after.keys()):
        changes = _changes(before[rule_id], after[rule_id])
        if changes:
            changed.append({**_name(after[rule_id]), "changes": changes})
    left: dict[str, list[Invariant]] = {}
    for rule in sorted(gone, key=lambda r: r.id):
        left.setdefault(hypothesis_id(rule.hypothesis), []).append(rule)
    added = []
    for rule in sorted(came, key=lambda r: r.id):
        twins = left.get(hypothesis_id(rule.hypothesis))
        if twins:
            twin = twins.pop(0)
            changed.append({**_name(rule), "was": twin.id, "changes": _changes(twin, rule)})
        else:
            added.append(_name(rule))
    removed = [_name(rule) for twins in left.values() for rule in twins]
    for listed in (added, removed, changed):
        listed.sort(key=lambda r: (r["relation"], r["id"]))
    return {"added": added, "removed": removed, "changed": changed}


def _name(rule: Invariant) -> dict[str, Any]:
    return {"id": rule.id, "relation": rule.relation, "text": rule.text, "when": rule.precondition.say()}


def _changes(a: Invariant, b: Invariant) -> dict[str, list[Any]]:
    """What differs between two rules of one hypothesis: before and after."""
    pairs: dict[str, tuple[Any, Any]] = {
        "precondition": (_conditions(a), _conditions(b)),
        "severity": (a.severity.value, b.severity.value),
        "tier": (a.tier.value, b.tier.value),
        "text": (a.text, b.text),
    }
    for name in ("passed", "excluded", "runs", "programs"):
        pairs[f"support.{name}"] = getattr(a.support, name), getattr(b.support, name)
    for name in ("tested", "failed"):
        pairs[f"false_alarm.{name}"] = getattr(a.false_alarm, name, None), getattr(b.false_alarm, name, None)
    return {name: [x, y] for name, (x, y) in pairs.items() if x != y}


def _conditions(rule: Invariant) -> str:
    """The whole precondition in words, also what must not be set; clauses in an order of their own."""
    clauses = [" and ".join(sorted(c.say() for c in clause)) or "always" for clause in rule.precondition.any_of]
    return "; or ".join(sorted(clauses))


def _print(found: dict[str, list[dict[str, Any]]], limit: int | None) -> None:
    from proctor.verify import wording

    if not any(found.values()):
        print("the same rules")
    for kind, sign in (("removed", "-"), ("added", "+"), ("changed", "~")):
        rules = found[kind]
        if rules:
            print(f"{wording.count(len(rules), 'rule')} {kind}")
        for rule in rules[:limit]:
            was = f" (was {rule['was']})" if "was" in rule else ""
            print(f"  {sign} {wording.clean(rule['id'])}{wording.clean(was)}  {wording.clean(rule['relation'])}: {wording.clean(rule['text'], 200)}")
            for name, (old, new) in rule.get("changes", {}).items():
                print(f"      {name}: {wording.clean(old, 300)}  →  {wording.clean(new, 300)}")
        if limit is not None and len(rules) > limit:
            print(f"  and {len(rules) - limit:,} more: --all")
