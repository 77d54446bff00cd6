"""What the actions of `proctor page` share: the outbox of a run, spans of time, and the picture of a status."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from proctor.errors import UsageError

if TYPE_CHECKING:
    from proctor.verify.paging.state import Status
    from proctor.verify.paging.store import Store

_SPAN: Final = re.compile(r"(\d{1,6})\s*([smhd])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def add_run(parser: argparse.ArgumentParser) -> None:
    """Declare `--run RUN`."""
    parser.add_argument("--run", dest="run_dir", metavar="RUN", required=True, help="run directory of the job")


def add_config(parser: argparse.ArgumentParser) -> None:
    """Declare `--config FILE`."""
    parser.add_argument("--config", metavar="FILE", default="page.toml", help="default: page.toml")


def outbox_path(args: argparse.Namespace) -> Path:
    """`RUN/verify/outbox.db`. Raises `UsageError` when there is no such run directory."""
    folder = Path(args.run_dir)
    if not folder.is_dir():
        raise UsageError(f"{folder} is no directory", hint="name the run directory of the job with --run")
    return folder / "verify" / "outbox.db"


def existing(args: argparse.Namespace) -> Store:
    """The outbox of a run. Raises `OutboxError` when it has none."""
    from proctor.verify.paging.store import Store

    return Store(outbox_path(args), create=False, busy_s=5.0)


def seconds(text: str) -> float:
    """`90m` in seconds. Raises `UsageError`."""
    match = _SPAN.fullmatch(text.strip())
    if not match or not int(match.group(1)):
        raise UsageError(f"{text!r} is no span of time", hint="write 30m, 2h or 1d")
    return float(int(match.group(1)) * _SECONDS[match.group(2)])


def span(seconds_: float) -> str:
    """`2 h 5 min`, `40 s`."""
    whole = int(seconds_)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min"
    return f"{whole // 3600} h {whole % 3600 // 60} min" if whole < 172800 else f"{whole // 86400} d"


def show(status: Status, now: float) -> None:
    """Print a status."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from proctor.verify.wording import clean

    console = Console(highlight=False)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("sink", "waiting", "retrying", "open", "held", "sent", "failed tries", "dead", "suppressed"):
        table.add_column(name, justify="left" if name == "sink" else "right")
    for sink, c in status.sinks.items():
        numbers = (c.waiting, c.retrying, c.open, c.held, c.sent, c.failed, c.dead, c.suppressed)
        table.add_row(escape("no sink" if sink == "-" else sink), *(f"{n:,}" for n in numbers))
    console.print(table if status.sinks else "Nothing was queued, sent or suppressed.")
    for line in status.lines:
        tries = f", {line.attempts} tries" if line.attempts else ""
        merged = f", {line.merged:,} merged" if line.merged else ""
        due = f", next in {span(line.due_in_s)}" if line.state != "dead" else ""
        text = f"{line.state:<8} {line.sink}: {line.action} {clean(line.title, 90)} ({span(line.age_s)} old{tries}{merged}{due})"
        console.print(escape(text), soft_wrap=True)
        if line.error:
            console.print(escape(f"         {clean(line.error, 200)}"), soft_wrap=True)
    for untold in status.untold:
        times = f" ({untold.count:,} times)" if untold.count > 1 else ""
        text = f"not told {untold.sink}: {clean(untold.title, 90)}: {clean(untold.reason, 160)}{times}"
        console.print(escape(text), soft_wrap=True)
    for mute in status.mutes:
        what = ", ".join(f"{k} {v}" for k, v in (("sink", mute.sink), ("key", mute.key), ("rule", mute.code)) if v)
        text = f"mute {mute.id}: {clean(what or 'everything', 200)} for another {span(mute.until - now)}, {clean(mute.say(), 200)}"
        console.print(escape(text), soft_wrap=True)
    for name, trouble in status.troubles.items():
        console.print(escape(f"trouble  {name}: {clean(trouble, 200)}"), soft_wrap=True)
