"""Commands that have actions, as `proctor pack list` has: one module an action, with `prepare`, `run` and its help as docstring."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from types import ModuleType


def declare(parser: argparse.ArgumentParser, actions: Mapping[str, ModuleType]) -> None:
    """Declare the arguments of all actions."""
    choices = parser.add_subparsers(metavar="ACTION", dest="action", required=True)
    for name, module in actions.items():
        help_ = (module.__doc__ or "").strip()
        action = choices.add_parser(
            name,
            help=help_.partition("\n")[0].rstrip("."),
            description=help_,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.prepare(action)
