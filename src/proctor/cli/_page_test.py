"""Send an incident marked TEST to every sink: it begins, is acknowledged where the receiver can, and ends.

It goes straight to the receivers, past mutes, budgets and the outbox. Exit code 1 when one did not take it.
"""

from __future__ import annotations

import argparse
import time
import uuid
from typing import TYPE_CHECKING

from proctor.cli import _page_outbox
from proctor.errors import DeliveryError, UsageError

if TYPE_CHECKING:
    from proctor.verify.notice import Notice
    from proctor.verify.sinks import Sink


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    _page_outbox.add_config(parser)
    parser.add_argument("--sink", metavar="NAME", action="append", default=[], help="only this one; may be repeated")


def run(args: argparse.Namespace) -> int:
    """Send and print one line a sink."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from proctor.verify.paging.config import read_config
    from proctor.verify.wording import clean

    config = read_config(args.config)
    sinks = config.open_sinks()
    for name in args.sink:
        if name not in sinks:
            raise UsageError(f"{args.config} has no sink {name!r}", hint=f"one of {', '.join(sinks) or 'none'}")
    chosen = [sink for name, sink in sinks.items() if not args.sink or name in args.sink]
    if not chosen:
        raise UsageError(f"{args.config} has no sink", hint="docs/paging.md shows an example")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("sink", "type", "trigger", "acknowledge", "resolve"):
        table.add_column(name)
    failures: list[str] = []
    for sink in chosen:
        cells, errors = _try(sink, config.job.name)
        table.add_row(escape(sink.name), sink.kind, *cells)
        failures += [f"{sink.name}: {clean(error, 300)}" for error in errors]
    console = Console(highlight=False)
    console.print(table)
    for failure in failures:
        console.print(escape(failure), soft_wrap=True)
    return 1 if failures else 0


def _try(sink: Sink, job: str) -> tuple[list[str], list[str]]:
    from proctor.verify.notice import Action
    from proctor.verify.sinks import Delivery

    key, began = f"proctor:{job or 'job'}:test:{uuid.uuid4().hex[:12]}", time.time()
    opened: Notice | None = None
    cells, errors = [], []
    for action in (Action.TRIGGER, Action.ACKNOWLEDGE, Action.RESOLVE):
        if action is Action.ACKNOWLEDGE and not sink.acknowledges:
            cells.append("–")
            continue
        if action is not Action.TRIGGER and opened is None:
            cells.append("not tried")
            continue
        notice = _notice(action, key, job, began)
        delivery = Delivery(
            notice=notice, event_id=uuid.uuid4().hex, at=time.time(), opened=opened, last=opened
        )
        begin = time.monotonic()
        try:
            sink.send(delivery)
        except DeliveryError as error:
            cells.append("FAILED")
            errors.append(f"{action.value}: {error.message}" + (f"  →  {error.hint}" if error.hint else ""))
            continue
        cells.append(f"taken, {(time.monotonic() - begin) * 1000:.0f} ms")
        opened = opened or notice
        time.sleep(min(sink.interval_s, 1.1))
    return cells, errors


def _notice(action: str, key: str, job: str, began: float) -> Notice:
    from proctor.invariants.invariant import Severity, Tier
    from proctor.verify.notice import Action, Notice

    return Notice(
        action=Action(action),
        key=key,
        tier=Tier.PAGE,
        severity=Severity.INFO,
        title="Proctor can reach you",
        text="Somebody ran `proctor page test`. Nothing is wrong, nothing is to be done.",
        job=job,
        source="proctor page test",
        code="PR299",
        began=began,
        at=time.time(),
        test=True,
    )
