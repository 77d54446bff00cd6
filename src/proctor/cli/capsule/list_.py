"""Capsules of a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from proctor.cli.capsule._text import clean
from proctor.errors import UsageError


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run_dir", metavar="RUN")


def run(args: argparse.Namespace) -> int:
    """One line a capsule."""
    from proctor.errors import ProctorError
    from proctor.invariants.capsule import capsules_of, read_capsule

    folder = Path(args.run_dir)
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a directory")
    found = capsules_of(folder)
    if not found:
        print(f"{folder} holds no capsules.")
        return 0
    for path in found:
        try:
            capsule = read_capsule(path)
        except ProctorError as e:
            print(f"{path.name}  unreadable: {e.message}")
            continue
        size = sum(p.stat().st_size for p in path.iterdir())
        about = f"control of step {capsule.control}" if capsule.control is not None else clean(capsule.key)
        values = "by value" if capsule.by_value else "fingerprints only"
        where = f"step {capsule.step}, rank {capsule.rank} of {capsule.world}"
        print(f"{path}  {where}, {values}, {size / 2**20:.1f} MiB, {capsule.written}  {about}")
    return 0
