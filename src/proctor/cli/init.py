"""Write a commented `proctor.toml`: the defaults of `watch` and `check` in this folder, one file.

    proctor init
    proctor init experiments/proctor.toml

Budget, packs, who is told, capsules and more, each with a comment on what it does. `page.toml` is named in it where it lies in the same
folder. Options on the command line count more than the file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from proctor.cli._parts.project import NAME, write


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("file", metavar="FILE", nargs="?", default=NAME, help=f"what to write (default {NAME}, which commands read)")
    parser.add_argument("--overwrite", action="store_true", help="replace the file")


def run(args: argparse.Namespace) -> int:
    """Write the file, and say what to do with it."""
    path = Path(args.file)
    page = "page.toml" if (path.parent / "page.toml").is_file() else ""
    write(path, overwrite=args.overwrite, page=page)
    print(f"wrote {path}; it counts for commands that are started in {path.resolve().parent}  →  proctor watch -- python train.py")
    return 0
