"""What several commands take: packs, shipped or named, and a run directory."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from proctor.errors import UsageError

if TYPE_CHECKING:
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
        help="rules to check against; default: the shipped packs",
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


def load_packs(paths: Sequence[Path]) -> tuple[list[Pack], list[str]]:
    """Read packs, the shipped ones when none is named; also gives their names.

    Raises:
        UsageError: none is named and none is shipped.
        PackError: a pack cannot be read.
    """
    from proctor.invariants.pack import read_pack
    from proctor.invariants.relations import registry

    chosen = list(paths) or shipped()
    if not chosen:
        raise UsageError(
            "no rules to check against: name a pack with -i (this installation ships none)",
            hint="proctor infer RUN… -o PACK",
        )
    known = list(registry())
    return [read_pack(path, known) for path in chosen], [str(path) for path in chosen]
