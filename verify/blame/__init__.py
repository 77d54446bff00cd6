"""The call most likely to blame where ranks part, with the reason in one sentence.

The checker asks it of every violation that holds ranks against each other, live and offline. The kinds of evidence are asked from the nearest to the cause on: how the
ranks began, calls that only some of them make, gradients, updates, buffers. It says only what the records show; where records of a rank are lost,
damaged or left out it says nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from proctor.invariants.relations import Detail
from proctor.invariants.relations.views import frames
from proctor.invariants.trace import Trace
from proctor.invariants.verdict import Cause
from proctor.verify.blame import batches, beginnings, gradients, skipped, updates
from proctor.verify.blame.scene import Scene

_KINDS: Final = (beginnings.explain, skipped.explain, gradients.explain, updates.explain, beginnings.buffer, skipped.branches)
_SHARED: Final = (batches.explain,)

_log = logging.getLogger(__name__)


def blame(trace: Trace, example: Mapping[str, Any], detail: Detail) -> Cause | None:
    """The cause of a failing example that holds ranks against each other; None of any other, and where the records do not say."""
    if not detail.sides:
        return None
    try:
        scene = _scene(trace, example, detail)
        if scene is None:
            return None
        # One side: what several ranks should not have in common.
        return next((cause for kind in (_KINDS if len(detail.sides) > 1 else _SHARED) if (cause := kind(scene)) is not None), None)
    except Exception:  # noqa: BLE001  the violation stands even where its cause cannot be told
        _log.info("no cause could be told", exc_info=True)
        return None


def _scene(trace: Trace, example: Mapping[str, Any], detail: Detail) -> Scene | None:
    ranks = sorted(rank for side in detail.sides for rank in side)
    proc, step = example.get("proc"), example.get("step")
    if proc is None or step is None:
        return None
    run = trace.processes[proc].run
    procs = {p.rank: i for i, p in enumerate(trace.processes) if p.run == run and p.rank in ranks}
    members = [trace.processes[i] for i in procs.values()]
    seen = set(frames.seen_steps(trace).filter(step=step)["proc"]) if step >= 0 else set(procs.values())
    whole = 1 < len(procs) == len(ranks) == len(set(ranks)) and set(procs.values()) <= seen
    if not whole or any(p.dropped or p.damaged is not None or p.blind for p in members):
        return None
    name = detail.variable.removesuffix(".grad")
    model = trace.variables.filter(name=name)["model"].to_list() if name else []
    return Scene(trace, step, procs, _odd(detail.sides), name if model else "", next((m for m in model if m), ""))


def _odd(sides: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The ranks of the smallest side; of sides of one size that of the highest rank."""
    return min((tuple(sorted(side)) for side in sides), key=lambda side: (len(side), -side[-1]))
