"""Try, inspect and silence the pages of a job.

  proctor page test --config page.toml        send a TEST incident to every sink: begin, acknowledge, end
  proctor page status --run RUN               what waits, what was sent, what was not and why
  proctor page flush --run RUN --config page.toml   send now what waits
  proctor page mute --run RUN --for 2h --reason TEXT   tell nobody for a while
  proctor page unmute --run RUN [ID]          tell people again

A muted incident that is not over when the mute ends is told then. docs/paging.md describes page.toml.
"""

from __future__ import annotations

import argparse
from typing import Final

from proctor.cli import _page_flush, _page_mute, _page_status, _page_test, _page_unmute
from proctor.cli._actions import declare

ACTIONS: Final = {
    "test": _page_test,
    "status": _page_status,
    "flush": _page_flush,
    "mute": _page_mute,
    "unmute": _page_unmute,
}


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    declare(parser, ACTIONS)


def run(args: argparse.Namespace) -> int:
    """Carry out the action."""
    code: int = ACTIONS[args.action].run(args)
    return code
