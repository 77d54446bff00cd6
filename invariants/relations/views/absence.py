"""What a trace has nothing of, told at a glance: why a view of it, or what a whole relation asks, has no rows.

A small job is judged in windows of some steps, and most of what is asked there has no records in most programs: no ranks, no averages. A query of an
empty table costs as much as one of a hundred rows.
"""

from __future__ import annotations

from proctor.invariants.relations.views.cache import lasting, memo
from proctor.invariants.schema import Name, Value
from proctor.invariants.trace import Trace


def alone(trace: Trace) -> bool:
    """No process is one of several ranks."""
    return all(p.world <= 1 for p in trace.processes)


def unseen(trace: Trace, kind: Value) -> bool:
    """No value of this kind was recorded."""
    return int(kind) not in memo(trace, "kinds of values", _kinds)


def _kinds(trace: Trace) -> frozenset[int]:
    return frozenset(trace.values["kind"].unique().to_list())


def whole(trace: Trace) -> bool:
    """No tensor is said to be a part of another one."""
    parts: bool = lasting(trace, Name.META, "parts of tensors", lambda t: any("Shard" in text or "tensor_model_parallel" in text for text in t.texts.get(Name.META, ())))
    return not parts


def without_buffers(trace: Trace) -> bool:
    """No variable is a buffer."""
    return not (trace.variables["role"] == "buffer").any()


def one_model(trace: Trace) -> bool:
    """No two models have one class: the second of them would have a number."""
    return not trace.variables["model"].str.contains("#").any()
