"""Show what waits, what was sent, and what was not and why."""

from __future__ import annotations

import argparse
import time

from proctor.cli.page import _outbox


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    _outbox.add_run(parser)
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(args: argparse.Namespace) -> int:
    """Print it; exit code 1 when something was rejected."""
    import msgspec

    from proctor.verify.paging.state import status

    store = _outbox.existing(args)
    try:
        found = status(store, time.time(), [])
    finally:
        store.close()
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        _outbox.show(found, time.time())
    return 1 if any(c.dead for c in found.sinks.values()) else 0
