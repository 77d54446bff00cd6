"""Send an incident marked TEST to every sink: it begins, is acknowledged where the receiver can, and ends.

It goes straight to the receivers, past mutes, budgets and the outbox. An Alertmanager takes an alert at once and tells people when its group
has waited: the test stays open until then. Exit code 1 when a receiver did not take it, or told nobody, or left somebody out. Whatever happens (the
answer is lost, Ctrl-C), the end is sent too, so that no test stays open.
"""

from __future__ import annotations

import argparse
import contextlib
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from proctor.cli.page import _outbox
from proctor.errors import DeliveryError, UsageError

if TYPE_CHECKING:
    from proctor.verify.notice import Notice
    from proctor.verify.sinks import Sink


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    _outbox.add_config(parser)
    parser.add_argument("--sink", metavar="NAME", action="append", default=[], help="only this one; may be repeated")
    parser.add_argument("--hold", metavar="TIME", default="", help="leave the test open for so long, to see it arrive: 30s, 2m")


def run(args: argparse.Namespace) -> int:
    """Send and print one line a sink."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from proctor.verify.paging.config import exposed_secrets, read_config
    from proctor.verify.wording import clean

    hold_s = _outbox.seconds(args.hold) if args.hold else 0.0
    config = read_config(args.config)
    sinks = config.open_sinks()
    for name in args.sink:
        if name not in sinks:
            raise UsageError(f"{args.config} has no sink {name!r}", hint=f"one of {', '.join(sinks) or 'none'}")
    chosen = [sink for name, sink in sinks.items() if not args.sink or name in args.sink]
    if not chosen:
        raise UsageError(f"{args.config} has no sink", hint="docs/paging.md shows an example")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("sink", "type", "trigger", "told", "acknowledge", "resolve"):
        table.add_column(name)
    failures: list[str] = []
    for sink in chosen:
        cells, errors = _try(sink, config.job.name, hold_s)
        table.add_row(escape(sink.name), sink.kind, *cells)
        failures += [f"{sink.name}: {clean(error, 300)}" for error in errors]
    console = Console(highlight=False)
    console.print(table)
    for warning in exposed_secrets(config):
        console.print(escape(f"{args.config}: {warning}"), soft_wrap=True)
    for failure in failures:
        console.print(escape(failure), soft_wrap=True)
    return 1 if failures else 0


def _try(sink: Sink, job: str, hold_s: float) -> tuple[list[str], list[str]]:
    """The cells of a sink's row, and what went wrong."""
    from proctor.verify.notice import Action

    key, began = f"proctor:{job or 'job'}:test:{uuid.uuid4().hex[:12]}", time.time()
    cells, errors = list[str](), list[str]()

    def attempt(name: str, work: Callable[[], str]) -> DeliveryError | None:
        try:
            cells.append(work())
        except DeliveryError as error:
            cells.append("FAILED")
            errors.append(f"{name}: {error.message}" + (f"  →  {error.hint}" if error.hint else ""))
            return error
        return None

    told: Callable[[str], str] | None = None

    def trigger() -> str:
        nonlocal told
        told = sink.way()
        return _send(sink, begin, None)

    def reaches() -> str:
        if sink.left_out:
            raise DeliveryError(sink.left_out)
        return told(key) if told is not None else "–"

    begin, over = _notice(Action.TRIGGER, key, job, began), _notice(Action.RESOLVE, key, job, began)
    ended = False
    try:
        if (failed := attempt("trigger", trigger)) is not None:
            ended = not failed.unsure
            return [*cells, *["not tried"] * 3], errors
        attempt("told", reaches)
        time.sleep(max(0.0, hold_s - (time.time() - began)))
        if sink.acknowledges:
            attempt(Action.ACKNOWLEDGE.value, partial(_send, sink, _notice(Action.ACKNOWLEDGE, key, job, began), begin))
        else:
            cells.append("–")
        ended = attempt(Action.RESOLVE.value, partial(_send, sink, over, begin)) is None
    finally:
        if not ended:  # interrupted, or nobody knows whether it was taken
            with contextlib.suppress(DeliveryError):
                _send(sink, over, begin)
    return cells, errors


def _send(sink: Sink, notice: Notice, opened: Notice | None) -> str:
    from proctor.verify.sinks import Delivery

    begin = time.monotonic()
    sink.send(Delivery(notice=notice, event_id=uuid.uuid4().hex, at=time.time(), opened=opened, last=opened))
    taken_s = time.monotonic() - begin
    time.sleep(min(sink.interval_s, 1.1))
    return f"taken, {taken_s * 1000:.0f} ms"


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
