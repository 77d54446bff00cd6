"""Explain a rule, a rule code or an error code in English.

  proctor explain 3fa2c1… -i pack.json    one rule: what it says, when it applies, what supports it
  proctor explain PR101                   what a family of rules catches (its name works as well)
  proctor explain PR-E200                 what an error means
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from proctor.cli._inputs import add_packs, load_packs
from proctor.errors import ProctorError, UsageError

if TYPE_CHECKING:
    from proctor.invariants.invariant import Invariant
    from proctor.invariants.relations import Relation


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("what", metavar="CODE|INVARIANT_ID", help="rule id or its beginning, PR1xx, or PR-Exxx")
    add_packs(parser)


def run(args: argparse.Namespace) -> int:
    """Print the explanation."""
    what: str = args.what
    if what.upper().startswith("PR-E"):
        print(_error(what.upper()))
        return 0
    from proctor.invariants.relations import registry

    known = registry()
    for relation in known.values():
        if what.upper() == relation.code.upper() or what == relation.name:
            print(_relation(relation))
            return 0
    if what.upper().startswith("PR"):
        codes = ", ".join(f"{r.code} {r.name}" for r in known.values()) or "none"
        raise UsageError(f"no relation has the code {what}; known: {codes}")
    packs, names = load_packs([Path(p) for p in args.packs])
    found = {rule.id: rule for pack in packs for rule in pack.invariants if rule.id.startswith(what)}
    if not found:
        raise UsageError(f"no rule {what!r} in {', '.join(names)}", hint="proctor pack show PACK")
    if len(found) > 1:
        raise UsageError(f"{what!r} begins {len(found)} rules: {', '.join(sorted(found)[:8])}")
    _rule(next(iter(found.values())), known)
    return 0


def _rule(rule: Invariant, known: dict[str, Relation]) -> None:
    from proctor.verify import wording
    from proctor.verify.report.terminal import console

    out = console()
    relation = known.get(rule.relation)
    code = relation.code if relation is not None else "?"
    out.print(f"{wording.clean(rule.text)}", style="bold")
    out.print(f"  applies   {wording.clean(wording.when(rule.precondition.say()))}", soft_wrap=True)
    if rule.precondition.absent():
        out.print(f"  absent    {wording.clean(', '.join(rule.precondition.absent()))} (must not be set)", soft_wrap=True)
    out.print(f"  support   {wording.support(rule.support)}", soft_wrap=True)
    out.print(f"  severity  {rule.severity.value}")
    out.print(f"  family    {code} {wording.clean(rule.relation)}")
    out.print(f"  id        {wording.clean(rule.id)}")
    for name, value in rule.hypothesis.params:
        out.print(f"  {wording.clean(name):<9} {wording.clean(value, 200)}", soft_wrap=True)
    if relation is not None:
        out.print()
        out.print(_relation(relation), soft_wrap=True)


def _relation(relation: Relation) -> str:
    module = sys.modules[type(relation).__module__]
    doc = inspect.getdoc(module) or inspect.getdoc(type(relation)) or "No description."
    return f"{relation.code} {relation.name} ({relation.severity.value})\n\n{doc}"


def _error(code: str) -> str:
    for kind in _errors(ProctorError):
        if kind.code == code:
            return f"{code}  {inspect.getdoc(kind)}"
    raise UsageError(f"no error has the code {code}; known: {', '.join(sorted({k.code for k in _errors(ProctorError)}))}")


def _errors(kind: type[ProctorError]) -> Iterator[type[ProctorError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _errors(child)
