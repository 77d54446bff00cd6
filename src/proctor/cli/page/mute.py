"""Tell nobody for a while: of everything, or of one sink, incident or rule.

Incidents are recorded meanwhile, and those that are not over when the mute ends are told then.
"""

from __future__ import annotations

import argparse
import time
from datetime import datetime

from proctor.cli.page import _outbox
from proctor.errors import UsageError


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    _outbox.add_run(parser)
    parser.add_argument("--for", dest="span", metavar="TIME", default="1h", help="30m, 2h, 1d; default: 1h; at most 30d")
    parser.add_argument("--reason", metavar="TEXT", default="", help="why; needed, since somebody will ask")
    parser.add_argument("--by", metavar="WHO", default="", help="who decided it")
    parser.add_argument("--sink", metavar="NAME", default="", help="only this sink")
    parser.add_argument("--key", metavar="KEY", default="", help="only the incident with this dedup key")
    parser.add_argument("--code", metavar="CODE", default="", help="only incidents of this rule, such as PR101")


def run(args: argparse.Namespace) -> int:
    """Write the mute into the outbox, which the verifier reads at every notice."""
    from proctor.verify.paging.ledger import Ledger
    from proctor.verify.paging.store import Store
    from proctor.verify.wording import clean

    seconds = _outbox.seconds(args.span)
    if seconds > 30 * 86400:
        raise UsageError(f"--for {args.span} is more than 30 days", hint="suppress the rule: proctor pack suppress")
    reason = " ".join(args.reason.split())
    if not reason:
        raise UsageError("a mute needs a reason", hint='--reason "restart of the storage"')
    path = _outbox.outbox_path(args)
    store = Store(path, create=True, busy_s=5.0) if not path.exists() else Store(path, create=False, busy_s=5.0)
    try:
        if not store.durable:
            raise UsageError(f"{path} cannot be written")
        until = time.time() + seconds
        number = Ledger(store).mute(
            until=until, reason=reason, by=args.by, sink=args.sink, key=args.key, code=args.code
        )
    finally:
        store.close()
    end = datetime.fromtimestamp(until).astimezone().strftime("%Y-%m-%d %H:%M %Z")
    print(f"mute {number} until {end}: {clean(reason)}  →  proctor page unmute --run {clean(args.run_dir)} {number}")
    return 0
