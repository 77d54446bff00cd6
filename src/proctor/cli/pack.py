"""List, show or lint packs of rules.

  proctor pack list [PACK…]    what packs there are, the shipped ones by default
  proctor pack show PACK       the rules of a pack in English
  proctor pack lint PACK…      what is wrong with a pack; exit code 1 if anything is
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from proctor.cli._inputs import shipped

if TYPE_CHECKING:
    from proctor.invariants.pack import Pack
    from proctor.invariants.relations import Relation

SHOWN: Final = 50  # rules, without --all


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    actions = parser.add_subparsers(metavar="ACTION", dest="action", required=True)
    listing = actions.add_parser("list", help="what packs there are")
    listing.add_argument("files", metavar="PACK", nargs="*")
    show = actions.add_parser("show", help="the rules of a pack in English")
    show.add_argument("files", metavar="PACK", nargs=1)
    show.add_argument("--relation", metavar="NAME", help="only rules of this family")
    show.add_argument("--all", action="store_true", dest="everything", help=f"more than the first {SHOWN}")
    lint = actions.add_parser("lint", help="what is wrong with a pack")
    lint.add_argument("files", metavar="PACK", nargs="+")


def run(args: argparse.Namespace) -> int:
    """Carry out the action."""
    paths = [Path(f) for f in args.files]
    if args.action == "list":
        return _list(paths or shipped())
    if args.action == "show":
        return _show(paths[0], args.relation, SHOWN if not args.everything else sys.maxsize)
    return _lint(paths)


def _list(paths: list[Path]) -> int:
    from proctor.invariants.pack import read_pack
    from proctor.verify import wording
    from proctor.verify.report.terminal import console

    out = console()
    if not paths:
        out.print("no packs are shipped with this installation; learn one: proctor infer RUN… -o PACK")
    for path in paths:
        pack = read_pack(path)
        families = Counter(rule.relation for rule in pack.invariants)
        kinds = ", ".join(f"{wording.clean(name)} {n}" for name, n in families.most_common())
        source = f"{wording.count(pack.provenance.runs, 'run')}, {wording.count(len(pack.provenance.programs), 'program')}"
        out.print(wording.clean(path), style="bold", soft_wrap=True)
        out.print(f"  {wording.count(len(pack.invariants), 'rule')} from {source}: {kinds or 'empty'}", soft_wrap=True)
    return 0


def _show(path: Path, family: str | None, limit: int) -> int:
    from proctor.invariants.pack import read_pack
    from proctor.verify import wording
    from proctor.verify.report.terminal import console

    out = console()
    pack = read_pack(path)
    origin = pack.provenance
    out.print(f"{wording.clean(path)}: {wording.count(len(pack.invariants), 'rule')}", style="bold", soft_wrap=True)
    out.print(
        f"  learned from {wording.count(origin.runs, 'run')} of {wording.clean(', '.join(origin.programs) or 'unknown programs', 200)}"
        f" ({wording.count(origin.records, 'record')}; {wording.clean(origin.tool or 'unknown tool')}, "
        f"torch {wording.clean(origin.torch or 'unknown')})",
        soft_wrap=True,
    )
    rules = [r for r in pack.invariants if family in (None, r.relation)]
    rules.sort(key=lambda r: (r.relation, -r.support.programs, -r.support.passed, r.id))
    for i, rule in enumerate(rules[:limit]):
        if i == 0 or rules[i - 1].relation != rule.relation:
            out.print()
            out.print(wording.clean(rule.relation), style="bold")
        out.print(f"  {wording.clean(rule.id)}  [{rule.severity.value}] {wording.clean(rule.text)}", soft_wrap=True)
        out.print(
            f"                {wording.clean(wording.when(rule.precondition.say()), 300)}; {wording.support(rule.support)}",
            style="dim",
            soft_wrap=True,
        )
    if len(rules) > limit:
        out.print(f"\n+{len(rules) - limit:,} more: --all")
    return 0


def _lint(paths: list[Path]) -> int:
    from proctor.invariants.pack import read_pack
    from proctor.invariants.relations import registry
    from proctor.verify import wording

    known = registry()
    bad = 0
    for path in paths:
        pack = read_pack(path)
        problems = list(_problems(pack, known))
        for problem in problems:
            print(f"{wording.clean(path)}: {wording.clean(problem)}")
        if not problems:
            print(f"{wording.clean(path)}: {wording.count(len(pack.invariants), 'rule')}, no problem")
        bad += len(problems)
    return 1 if bad else 0


def _problems(pack: Pack, known: dict[str, Relation]) -> Iterator[str]:
    from proctor.invariants.invariant import invariant_id

    if not pack.invariants:
        yield "no rule in it: every check with it is inconclusive"
    for repeated, n in Counter(rule.id for rule in pack.invariants).items():
        if n > 1:
            yield f"rule {repeated} occurs {n} times"
    for i, rule in enumerate(pack.invariants):
        where = f"$.invariants[{i}] ({rule.id})"
        relation = known.get(rule.relation)
        if relation is None:
            yield f"{where}: unknown relation {rule.relation!r}; the rule would be skipped"
        else:
            try:
                relation.say(rule.hypothesis)
                relation.needs(rule.hypothesis)
            except Exception as error:  # noqa: BLE001  a malformed rule is a finding, whatever it raises
                yield f"{where}: parameters do not fit the relation ({type(error).__name__}: {error})"
        if rule.id != invariant_id(rule.hypothesis, rule.precondition):
            yield f"{where}: the id is not that of this rule; was it edited by hand?"
        if not rule.precondition.any_of:
            yield f"{where}: the precondition is empty, so the rule never applies"
        if rule.support.passed <= 0:
            yield f"{where}: no example supports it"
        if not rule.text.strip():
            yield f"{where}: no text"
