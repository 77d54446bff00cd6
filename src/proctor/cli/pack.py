"""List, show, compare, merge, suppress and lint packs of rules.

  proctor pack list [PACK…]         what packs there are, the shipped ones by default
  proctor pack show PACK            the rules of a pack in English
  proctor pack lint PACK…           what is wrong with a pack; exit code 1 if anything is
  proctor pack merge A B… -o C      one pack of several
  proctor pack diff A B             what changed from one pack to another; exit code 1 if anything did
  proctor pack suppress PACK ID     do not report violations of a rule, for a reason, until a day
  proctor pack stamp PACK           write down what a pack is for and how quiet it was
"""

from __future__ import annotations

import argparse
from typing import Final

from proctor.cli import (
    _pack_diff,
    _pack_lint,
    _pack_list,
    _pack_merge,
    _pack_show,
    _pack_stamp,
    _pack_suppress,
)
from proctor.cli._actions import declare

ACTIONS: Final = {
    "list": _pack_list,
    "show": _pack_show,
    "lint": _pack_lint,
    "merge": _pack_merge,
    "diff": _pack_diff,
    "suppress": _pack_suppress,
    "stamp": _pack_stamp,
}


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    declare(parser, ACTIONS)


def run(args: argparse.Namespace) -> int:
    """Carry out the action."""
    code: int = ACTIONS[args.action].run(args)
    return code
