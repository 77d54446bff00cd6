"""One pack of several: equal rules once, and no rule that a healthy run of any of the packs contradicts.

Support adds up over different runs; a run that several packs were learned from counts once. Where packs put one
rule under different preconditions, they become alternatives as long as no pack saw the rule fail; where one did, the
rule is narrowed to where none did, or withdrawn. What happened to such rules is said on standard error.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from proctor.errors import UsageError

_SAID: Final = 20  # rules whose preconditions differed, without --all


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("files", metavar="PACK", nargs="+")
    parser.add_argument("-o", "--output", metavar="PACK", required=True, help="the pack to write")
    parser.add_argument("--reduce", action="store_true", help="leave out rules that another one implies")
    parser.add_argument("--all", action="store_true", dest="everything", help=f"say what became of more than {_SAID} rules")


def run(args: argparse.Namespace) -> int:
    """Merge, write, and say what became of rules that differed."""
    import msgspec

    from proctor.infer.merging import merge_packs
    from proctor.infer.selection.redundant import without_implied
    from proctor.invariants.pack import read_pack, write_pack
    from proctor.invariants.relations import registry
    from proctor.verify import wording

    if Path(args.output).is_dir():
        raise UsageError(f"{args.output}: is a directory, expected the name of a pack file", hint="-o rules.json")
    packs = [read_pack(Path(f)) for f in args.files]
    merged, notes = merge_packs(packs)
    if args.reduce:
        kept, gone = without_implied(merged.invariants, registry())
        merged = msgspec.structs.replace(merged, invariants=kept)
        notes += [f"left out: rule {g.rule}: rule {g.kept} implies it" for g in gone]
    write_pack(merged, Path(args.output))
    limit = len(notes) if args.everything else _SAID
    for note in notes[:limit]:
        print(wording.clean(note, 500), file=sys.stderr)
    if len(notes) > limit:
        print(f"and {len(notes) - limit:,} more: --all", file=sys.stderr)
    total = sum(len(p.invariants) for p in packs)
    lost = f", {wording.count(len(merged.withdrawn), 'rule')} withdrawn" if merged.withdrawn else ""
    print(f"{wording.clean(args.output)}: {wording.count(len(merged.invariants), 'rule')} of {total:,} in {wording.count(len(packs), 'pack')}{lost}")
    return 0
