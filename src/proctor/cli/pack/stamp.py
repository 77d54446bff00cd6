"""Write down what a pack is for and how quiet it was on healthy runs that it was not learned from."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from proctor.errors import UsageError


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("file", metavar="PACK")
    parser.add_argument(
        "--requires", metavar="NAME[VERSIONS]", nargs="+", help="where it fits, such as torch>=2.6,<3 transformers"
    )
    parser.add_argument("--note", metavar="TEXT", help="for whoever reads the pack")
    parser.add_argument(
        "--measured",
        metavar="PROGRAMS,RUNS,CHECKED,FAILED",
        help="held-out healthy programs and runs, rules that applied in them, and how many of these failed",
    )
    parser.add_argument("--record", metavar="FILE", help="what healthy programs of strangers said of each rule (docs/paging.md)")


def run(args: argparse.Namespace) -> int:
    """Rewrite the pack."""
    from proctor.invariants.fit import parse_requirement
    from proctor.invariants.pack import Measured, read_pack, write_pack
    from proctor.verify import wording

    path = Path(args.file)
    requires = None
    if args.requires is not None:
        try:
            requires = dict(parse_requirement(text) for text in args.requires)
        except ValueError as error:
            raise UsageError(f"--requires {error}") from None
    measured = None
    if args.measured is not None:
        if not re.fullmatch(r"\d{1,9},\d{1,9},\d{1,9},\d{1,9}", args.measured):
            raise UsageError(f"--measured {args.measured}: expected four numbers, as in 9,36,2240,0")
        measured = Measured(*map(int, args.measured.split(",")))
        if measured.failed > measured.checked:
            raise UsageError(f"--measured {args.measured}: more failed than were checked")
    if requires is None and measured is None and args.note is None and args.record is None:
        raise UsageError("nothing to write down", hint="--requires torch>=2.6,<3 --note TEXT --measured 9,36,2240,0")
    pack, recorded = read_pack(path), ""
    if args.record is not None:
        from proctor.invariants.record import read_records, with_records

        pack, number = with_records(pack, read_records(Path(args.record)))
        recorded = f", {number} of {wording.count(len(pack.invariants), 'rule')} with a record"
    write_pack(pack, path, requires=requires, note=args.note, measured=measured)
    print(f"{wording.clean(path)}: stamped{recorded}")
    return 0
