"""Forwards that were not trained on: torch's pipeline stages first run on empty tensors to learn shapes.

A process that calls all its modules before the first microbatch and never sends a gradient back through those calls has
only tried itself out. Such calls hold whatever was in memory and are nobody's microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from proctor.oracle.tensors import Entry

_CROSSING = ("input", "output", "grad_input", "grad_output", "score", "choice", "dropped", "mask")


def without_dry_runs(entries: Sequence[Entry]) -> tuple[list[Entry], dict[int, int]]:
    """Take out the first calls of every module that no gradient came back through, and count from the next one.

    Only as many as all modules have that gradients flow through at all: a single module that is called without is left.

    Args:
        entries: of one rank.

    Returns:
        the others, and for each step how many calls were taken from each module, where there were any.
    """
    seen: dict[int, dict[str, set[int]]] = {}
    trained: dict[int, dict[str, set[int]]] = {}
    for e in entries:
        if e.kind == "output" and not e.recompute:
            seen.setdefault(e.step, {}).setdefault(e.name, set()).add(e.call)
        elif e.kind == "grad_output":
            trained.setdefault(e.step, {}).setdefault(e.name, set()).add(e.call)
    dry: dict[int, int] = {}
    for step, modules in trained.items():
        first = min((min(calls) for name, calls in modules.items() if name in seen.get(step, {})), default=0)
        if first:
            dry[step] = first
    if not dry:
        return list(entries), dry
    out: list[Entry] = []
    for e in entries:
        less = dry.get(e.step, 0)
        if e.kind not in _CROSSING or e.recompute or not less:
            out.append(e)
        elif e.call >= less:
            out.append(msgspec.structs.replace(e, call=e.call - less))
    return out, dry
