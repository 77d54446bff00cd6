"""Send now what waits; exit code 1 when something still waits afterwards.

Where the job's verifier runs it does the sending, otherwise this command does.
"""

from __future__ import annotations

import argparse
import sys
import time

from proctor.cli.page import _outbox


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    _outbox.add_run(parser)
    _outbox.add_config(parser)
    parser.add_argument("--timeout", metavar="TIME", default="30s", help="how long to try; default: 30s")
    parser.add_argument("--dead", action="store_true", help="also what receivers rejected, after the cause is repaired")


def run(args: argparse.Namespace) -> int:
    """Send, then show what is left."""
    from proctor.verify.paging.config import read_config
    from proctor.verify.paging.outbox import Outbox
    from proctor.verify.paging.pager import Pager
    from proctor.verify.paging.state import status

    patience_s = _outbox.seconds(args.timeout)
    config = read_config(args.config)
    store = _outbox.existing(args)
    try:
        outbox = Outbox(store)
        outbox.hurry(dead=args.dead)
        end = time.monotonic() + patience_s
        if store.claim_sending():
            store.release_sending()
            pager = Pager(config, _outbox.outbox_path(args), say=lambda text: print(text, file=sys.stderr))
            pager.start()
            while outbox.waits() and time.monotonic() < end:
                time.sleep(0.05)
            pager.close(2.0, finished=False, outlive=False)
        else:
            print("the verifier of this job is running and sends", file=sys.stderr)
            while outbox.waits() and time.monotonic() < end:
                time.sleep(0.2)
        found = status(store, time.time(), list(config.sinks))
    finally:
        store.close()
    _outbox.show(found, time.time())
    return 1 if found.waiting else 0
