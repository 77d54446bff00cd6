"""What packs there are, the shipped ones by default."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("files", metavar="PACK", nargs="*")


def run(args: argparse.Namespace) -> int:
    """Print a paragraph a pack."""
    from proctor.invariants.pack import read_pack
    from proctor.verify import wording
    from proctor.verify.report.formats.terminal import console

    out = console()
    from proctor.invariants.pack import shipped

    paths = [Path(f) for f in args.files] or shipped()
    if not paths:
        out.print("no packs are shipped with this installation; learn one: proctor infer RUN… -o PACK")
    for path in paths:
        pack = read_pack(path)
        origin = pack.provenance
        families = Counter(rule.relation for rule in pack.invariants)
        kinds = ", ".join(f"{wording.clean(name)} {n}" for name, n in families.most_common())
        source = f"{wording.count(origin.runs, 'run')}, {wording.count(len(origin.programs), 'program')}"
        wanted = ", ".join(f"{k}{v}" for k, v in sorted(pack.requires.items()))
        quiet = wording.measured(origin.measured) if origin.measured is not None else ""
        out.print(wording.clean(path), style="bold", soft_wrap=True)
        out.print(f"  {wording.count(len(pack.invariants), 'rule')} from {source}: {kinds or 'empty'}", soft_wrap=True)
        for label, text in (("for", wanted), ("false alarms", quiet), ("note", origin.note)):
            if text:
                out.print(f"  {label}: {wording.clean(text, 300)}", soft_wrap=True)
    return 0
