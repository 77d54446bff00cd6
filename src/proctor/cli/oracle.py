"""Compare a run with a trusted reference: is it the same computation, and where does it begin to differ.

  proctor oracle record -o DIR -- CMD       record the first step of a command, unchanged
  proctor oracle compare REF CAND           is the candidate the reference's computation? exit code 0, 1, or 3
  proctor oracle run --reference "…" --candidate "…"   both, and the place where they part
  proctor oracle localise REF CAND          which module is wrong, in which direction, at which operation
  proctor oracle plan PLAN [RECORDING]      what a plan says, and what it forgets
  proctor oracle self -- CMD                no reference? the program is its own, under changes that must not matter
  proctor oracle fuzz --budget 10m             look for bugs in a distributed library itself: generated models under generated settings
  proctor oracle prove --reference "…" --candidate "…"   is it the same formula, for all data? 0, 1, or 3
  proctor oracle replay CAPSULE --reference "…"        was a step that `watch` kept what the reference computes? 0, 1, or 3
"""

from __future__ import annotations

import argparse
from typing import Final

from proctor.cli import (
    _oracle_compare,
    _oracle_fuzz,
    _oracle_localise,
    _oracle_plan,
    _oracle_prove,
    _oracle_record,
    _oracle_replay,
    _oracle_run,
    _oracle_self,
)
from proctor.cli._actions import declare

ACTIONS: Final = {
    "record": _oracle_record,
    "compare": _oracle_compare,
    "run": _oracle_run,
    "localise": _oracle_localise,
    "plan": _oracle_plan,
    "fuzz": _oracle_fuzz,
    "prove": _oracle_prove,
    "replay": _oracle_replay,
    "self": _oracle_self,
}


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    declare(parser, ACTIONS)


def run(args: argparse.Namespace) -> int:
    """Carry out the action."""
    code: int = ACTIONS[args.action].run(args)
    return code
