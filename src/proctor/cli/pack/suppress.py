"""Do not report violations of a rule, for a reason, until a day.

They are counted and shown as suppressed by `proctor check`. The suppression is written into the pack, or with --to
into a file of its own (TOML, or JSON by its name) that `proctor check --suppressions FILE` reads.
"""

from __future__ import annotations

import argparse
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from proctor.cli._parts.inputs import one_rule
from proctor.errors import UsageError

if TYPE_CHECKING:
    from proctor.invariants.suppression import Suppression


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("file", metavar="PACK")
    parser.add_argument("rule", metavar="ID", help="the id of the rule or its beginning")
    parser.add_argument("--reason", metavar="TEXT", default="", help="why; needed, since somebody will ask")
    parser.add_argument("--until", metavar="DATE", default="", help="last day on which it holds, YYYY-MM-DD")
    parser.add_argument("--program", metavar="NAME", default="", help="only in runs of this program, such as train.py")
    parser.add_argument("--by", metavar="WHO", default="", help="who decided it")
    parser.add_argument("--to", metavar="FILE", help="write into this file instead of the pack")
    parser.add_argument("--remove", action="store_true", help="report the rule again")


def run(args: argparse.Namespace) -> int:
    """Change the pack or the file, and say what now holds."""
    import msgspec

    from proctor.invariants.pack import read_pack, write_pack
    from proctor.invariants.suppression import read_suppressions, write_suppressions
    from proctor.verify import wording

    path = Path(args.file)
    pack = read_pack(path)
    rule = one_rule(args.rule, [pack], [str(path)])
    target = path if args.to is None else Path(args.to)
    if args.to is None:
        held = pack.suppressions
    else:
        held = read_suppressions(target) if target.exists() else ()
    kept = tuple(s for s in held if (s.rule, s.program) != (rule.id, args.program))
    if args.remove:
        if len(kept) == len(held):
            raise UsageError(f"rule {rule.id} is not suppressed in {target}", hint=f"proctor pack show {path}")
        said = "is reported again"
    else:
        suppression = _suppression(args, rule.id)
        kept = (*kept, suppression)
        end = f" until {suppression.until}" if suppression.until else " with no end"
        where = f" in runs of {suppression.program}" if suppression.program else ""
        said = f"is suppressed{where}{end}: {suppression.reason}"
    if args.to is None:
        write_pack(msgspec.structs.replace(pack, suppressions=tuple(sorted(kept))), path)
    else:
        write_suppressions(sorted(kept), target)
    print(f"{wording.clean(target)}: rule {rule.id} ({wording.clean(rule.text, 120)}) {wording.clean(said)}")
    return 0


def _suppression(args: argparse.Namespace, rule: str) -> Suppression:
    from proctor.invariants.suppression import Suppression, parse_date

    reason = " ".join(args.reason.split())
    if not reason:
        raise UsageError("a suppression needs a reason", hint='--reason "known until the loader is fixed"')
    if args.until:
        try:
            day = parse_date(args.until)
        except ValueError as error:
            raise UsageError(f"--until {error}") from None
        if day < date.today():
            raise UsageError(f"--until {args.until}: that day is over")
    return Suppression(rule, reason, args.until, args.program, args.by)
