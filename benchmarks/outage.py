"""20,000 incidents while the receiver of pages is down: what the outbox costs, what is lost, and what arrives when it is back.

    python benchmarks/outage.py [--incidents N] [--write]

Each incident has a key of its own and begins while nobody listens at the receiver's port; then it listens. Exit code 1 when an incident is in no page
and in no digest, or a page comes twice. `--write` puts the figures into docs/reliability.md.
"""

from __future__ import annotations

import argparse
import re
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from helpers.live.pages import notice
from helpers.live.receivers import ROUTING_KEY, PagerDuty, free_port, wait_until

from proctor.verify.paging.config import read_config
from proctor.verify.paging.pager import Pager

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "reliability.md"
BEGIN, END = "<!-- outage -->", "<!-- end of outage -->"
_OTHERS: Final = re.compile(r"([\d,]+) more incidents")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--incidents", type=int, default=20_000)
    parser.add_argument("--write", action="store_true", help="put the figures into docs/reliability.md")
    args = parser.parse_args()
    port = free_port()
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        (place / "key").write_text(ROUTING_KEY)
        (place / "key").chmod(0o600)
        sink = f'[sinks.oncall]\ntype = "pagerduty"\ntier = "all"\nurl = "http://127.0.0.1:{port}"\nrouting_key_file = "key"\ntimeout_s = 2\n'
        (place / "page.toml").write_text(f"[budget]\ndigest_s = 1\n{sink}")
        began = resource.getrusage(resource.RUSAGE_SELF)
        pager = Pager(read_config(place / "page.toml"), place / "verify" / "outbox.db", say=lambda _: None)
        pager.start()
        for i in range(args.incidents):
            now = time.time()
            pager.notify(notice(f"proctor:job:r{i}:dp", title=f"layers.{i}.norm.weight differs between ranks", began=now, at=now))
        used = resource.getrusage(resource.RUSAGE_SELF)
        cpu_s = used.ru_utime + used.ru_stime - began.ru_utime - began.ru_stime
        mib = sum(f.stat().st_size for f in (place / "verify").iterdir()) / 2**20
        receiver = PagerDuty(port)
        for sender in pager.senders:
            sender.retry_now()

        def told() -> int:
            return sum(_number(one.summaries[-1]) for one in receiver.incidents)

        wait_until(lambda: told() >= args.incidents, 120)
        pager.close(5.0, outlive=False)
        receiver.close()
        number, keys = told(), [one.key for one in receiver.incidents]
    twice = len(keys) - len(set(keys))
    said = (
        f"{args.incidents:,} incidents in one outage of the receiver: {cpu_s:.0f} CPU seconds and {mib:.0f} MiB of outbox; when it is back {len(keys)} pages, "
        f"which tell of {number:,} incidents, {twice} of them twice; {len(receiver.rejected)} refused."
    )
    print(said)
    if args.write:
        head, _, rest = PAGE.read_text().partition(BEGIN)
        _, _, tail = rest.partition(END)
        PAGE.write_text(f"{head}{BEGIN}\n{said}\n{END}{tail}")
    return 0 if number == args.incidents and not twice and not receiver.rejected else 1


def _number(summary: str) -> int:
    """Incidents that a page tells of."""
    found = _OTHERS.search(summary)
    return int(found[1].replace(",", "")) if found else 1


if __name__ == "__main__":
    sys.exit(main())
