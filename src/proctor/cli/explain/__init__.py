"""Explain a rule, a rule code or an error code in English.

  proctor explain 3fa2c1… -i pack.json    one rule: what it says, when it applies, why it is believed
  proctor explain 3fa2c1… --run RUN       and where it held and failed in a run
  proctor explain PR101                   what a family of rules catches (its name works as well)
  proctor explain PR201                   what a notice about the monitoring itself means
  proctor explain PR-E200                 what an error means
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from proctor.cli._parts.inputs import add_packs, one_rule
from proctor.errors import ProctorError, UsageError

if TYPE_CHECKING:
    from proctor.invariants.relations import Relation


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("what", metavar="CODE|INVARIANT_ID", help="rule id or its beginning, PR1xx, PR2xx, or PR-Exxx")
    add_packs(parser)
    parser.add_argument("--run", dest="run_dir", metavar="RUN", help="also evaluate the rule on this run")


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
        from proctor.cli.explain.own import OWN, show

        if what.upper() in OWN:
            print(show(what.upper()))
            return 0
        codes = ", ".join([*(f"{r.code} {r.name}" for r in known.values()), *(f"{code} {own.name}" for code, own in OWN.items())])
        raise UsageError(f"nothing has the code {what}; known: {codes}")
    from proctor.invariants.fit import load_packs

    packs, names = load_packs([Path(p) for p in args.packs])
    rule = one_rule(what, packs, names)
    pack = next(p for p in packs if any(r is rule for r in p.invariants))
    family = known.get(rule.relation)
    from proctor.cli.explain import rule as says

    says.show_rule(rule, family, pack)
    if args.run_dir is not None:
        if family is None:
            raise UsageError(f"relation {rule.relation!r} is not known here, so the rule cannot be evaluated")
        says.show_run(rule, family, Path(args.run_dir))
    says.show_next(rule, names if args.packs else [], evaluated=args.run_dir is not None)
    if family is not None:
        print()
        print(_relation(family))
    return 0


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
