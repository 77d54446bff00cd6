"""What several commands take: packs, a run directory, the beginning of a rule's id."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from proctor.errors import UsageError

if TYPE_CHECKING:
    from proctor.invariants.invariant import Invariant
    from proctor.invariants.pack import Pack


def add_packs(parser: argparse.ArgumentParser) -> None:
    """Declare `-i PACK…`."""
    parser.add_argument(
        "-i",
        "--pack",
        dest="packs",
        metavar="PACK",
        nargs="+",
        action="extend",
        default=[],
        help="rules to check against; default: the shipped packs that fit the run",
    )


def run_and_packs(args: argparse.Namespace) -> tuple[Path, list[Path]]:
    """The run and the packs, also from `-i PACK RUN`, where argparse takes the run for one more pack.

    Raises:
        UsageError: no run was named.
    """
    packs = [Path(p) for p in args.packs]
    if args.run_dir is not None:
        return Path(args.run_dir), packs
    if len(packs) > 1 and packs[-1].suffix != ".json":
        return packs[-1], packs[:-1]
    raise UsageError("no run directory was named", hint=f"proctor {args.subcommand} RUN -i PACK")


def one_rule(beginning: str, packs: Sequence[Pack], names: Sequence[str]) -> Invariant:
    """The rule whose id is or begins with this; of several packs' copies the best supported.

    Raises:
        UsageError: there is none, or there are several.
    """
    from proctor.verify.rules import merge_rules

    found = {rule.id: rule for rule in merge_rules(packs) if rule.id.startswith(beginning)}
    if beginning in found:
        return found[beginning]
    if not found:
        raise UsageError(f"no rule {beginning!r} in {', '.join(names)}", hint="proctor pack show PACK")
    if len(found) > 1:
        raise UsageError(f"{beginning!r} begins {len(found)} rules: {', '.join(sorted(found)[:8])}")
    return next(iter(found.values()))
