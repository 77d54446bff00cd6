"""Tell people again: end one mute, or all. Incidents that are not over are told then."""

from __future__ import annotations

import argparse

from proctor.cli.page import _outbox
from proctor.errors import UsageError


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    _outbox.add_run(parser)
    parser.add_argument("id", metavar="ID", nargs="?", type=int, help="of the mute, as `page status` shows it")
    parser.add_argument("--all", action="store_true", help="end every mute")


def run(args: argparse.Namespace) -> int:
    """End the mute; exit code 2 when there is none."""
    from proctor.verify.paging.ledger import Ledger
    from proctor.verify.wording import count

    store = _outbox.existing(args)
    try:
        ledger = Ledger(store)
        running = ledger.mutes()
        if args.id is None and not args.all and len(running) > 1:
            raise UsageError(f"{len(running)} mutes are running", hint="name one by its ID, or --all")
        if args.id is not None and args.id not in {m.id for m in running}:
            known = ", ".join(str(m.id) for m in running) or "none"
            raise UsageError(f"there is no mute {args.id}; running: {known}")
        ended = ledger.unmute(args.id)
    finally:
        store.close()
    print(f"{count(ended, 'mute')} ended")
    return 0
