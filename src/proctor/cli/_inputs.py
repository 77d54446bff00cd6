"""What several commands take: packs, shipped or named, and a run directory."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from proctor.errors import UsageError

if TYPE_CHECKING:
    from proctor.invariants.invariant import Invariant
    from proctor.invariants.pack import Pack
    from proctor.invariants.trace import Trace

_REASONS: Final = 3  # why packs do not fit, that one line lists


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


def shipped() -> list[Path]:
    """Packs that come with Proctor."""
    import proctor.invariants

    folder = Path(proctor.invariants.__file__).with_name("packs")
    return sorted(folder.glob("*.json"))


def load_packs(paths: Sequence[Path], trace: Trace | None = None) -> tuple[list[Pack], list[str]]:
    """Read packs, the shipped ones that fit a run when none is named; also gives their names.

    Args:
        paths: as the user named them.
        trace: of the run; without one all shipped packs are read.

    Raises:
        UsageError: none is named, and none is shipped or none of these fits.
        PackError: a pack cannot be read.
    """
    from proctor.invariants.fit import misfit, used
    from proctor.invariants.pack import read_pack
    from proctor.invariants.relations import registry

    known = list(registry())
    if paths:
        return [read_pack(path, known) for path in paths], [str(path) for path in paths]
    hint = "proctor infer RUN… -o PACK"
    if not shipped():
        raise UsageError("no rules to check against: name a pack with -i (this installation ships none)", hint=hint)
    versions = None if trace is None else used(trace)
    packs, names, reasons = [], [], []
    for path in shipped():
        pack = read_pack(path, known)
        reason = "" if versions is None else misfit(pack.requires, versions)
        if reason:
            reasons.append(f"{path.stem}: {reason}")
        else:
            packs.append(pack)
            names.append(str(path))
    if not packs:
        more = f"; and {len(reasons) - _REASONS} more" if len(reasons) > _REASONS else ""
        raise UsageError(f"no shipped pack fits this run, name one with -i ({'; '.join(reasons[:_REASONS])}{more})", hint=hint)
    return packs, names


def one_rule(beginning: str, packs: Sequence[Pack], names: Sequence[str]) -> Invariant:
    """The rule whose id is or begins with this; of several packs' copies the best supported.

    Raises:
        UsageError: there is none, or there are several.
    """
    from proctor.verify.checker import merge_rules

    found = {rule.id: rule for rule in merge_rules(packs) if rule.id.startswith(beginning)}
    if beginning in found:
        return found[beginning]
    if not found:
        raise UsageError(f"no rule {beginning!r} in {', '.join(names)}", hint="proctor pack show PACK")
    if len(found) > 1:
        raise UsageError(f"{beginning!r} begins {len(found)} rules: {', '.join(sorted(found)[:8])}")
    return next(iter(found.values()))
