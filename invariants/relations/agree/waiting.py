"""Waits that do not end: how long a healthy one may take, and the row that says who stopped and who waits.

The front file asks for `what="turn"`. In: calls that had not returned (`views.collectives.stuck`). Out: one failing row a wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import polars as pl

from proctor.invariants.codec import collective
from proctor.invariants.relations.views import collectives as _collectives
from proctor.invariants.trace import Trace

PATIENCE_S: Final = (10, 60, 300, 1800, 7200)  # seconds; a wait that a busy rank may end
_MARGIN: Final = 5  # times the longest wait that was seen in a healthy run


def longest_call_s(trace: Trace) -> float:
    """Longest collective call of a trace, in seconds."""
    codes = [c for c, name in enumerate(trace.functions) if name in _collectives.FUNCTIONS]
    longest = trace.calls.filter(pl.col("fn").is_in(codes))["dur"].max()
    return float(longest) / 1e9 if isinstance(longest, int | float) else 0.0


def patience_s(longest_s: float) -> int:
    return next((p for p in PATIENCE_S if p >= _MARGIN * longest_s), PATIENCE_S[-1])


STUCK: Final = {
    "passed": pl.Boolean, "proc": pl.UInt16, "step": pl.Int32, "seq": pl.UInt32, "site": pl.UInt32, "group": pl.String, "fn": pl.String,
    "_fn": pl.String, "_group": pl.String, "_item": pl.Int32, "_caller": pl.String, "_seen": pl.String,
}  # fmt: skip


def stuck_row(trace: Trace, s: _collectives.Stuck) -> tuple[Any, ...]:
    ranks = sorted(trace.processes[p].rank for p in s.waiting)
    culprit = trace.processes[s.culprit]
    mine = _collectives.sent(trace).filter((pl.col("proc") == s.culprit) & (pl.col("group") == s.group)).sort("item")
    waiter = _collectives.sent(trace).filter((pl.col("proc") == s.waiting[0]) & (pl.col("group") == s.group) & (pl.col("item") == s.item))
    last = mine.tail(1).to_dicts()
    after = f" after call {s.calls} of the group ({last[0]['fn']}{_at(trace, last[0])}, step {last[0]['step']})" if last else " before its first call of the group"
    elsewhere = next((w for w in culprit.waiting), None)
    instead = {
        "ended": "and has ended",
        "busy": "and has not made another call",
        "waits elsewhere": f"and waits in another one{f' at {elsewhere.site}' if elsewhere and elsewhere.site else ''}",
    }[s.why]
    who = f"rank {ranks[0]} waits" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:16]))} wait"
    where = f" at {s.site}" if s.site else ""
    seen = f"rank {culprit.rank} stopped issuing collectives{after} {instead}; {who} in {s.place.fn}{where} for {s.seconds:.0f} s"
    step = waiter["step"][0] if waiter.height else (last[0]["step"] if last else -1)
    world = "world" if len(collective.ranks_of(s.place.group.ranks)) == culprit.world else "part"
    site = last[0]["site"] if last else 0
    return (False, s.culprit, step, 0, site, world, s.place.fn, s.place.fn, f"the group of ranks {s.place.group.ranks}", s.item, "", seen)


def _at(trace: Trace, row: Mapping[str, Any]) -> str:
    return f" at {trace.sites[row['site']]}" if row["site"] else ""
