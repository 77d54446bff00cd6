"""Views of a trace, each made at its first use and kept with the trace.

Every relation asks for views through these three functions. A view must follow from the trace alone. `infer.shards` counts
what is kept against `--memory`; windows of a run that goes on hand on what follows from texts (`verify.live.views`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, TypeVar

import polars as pl

from proctor.invariants.schema import Name
from proctor.invariants.trace import Trace

T = TypeVar("T")
_EMPTY: Final[dict[str, pl.DataFrame]] = {}  # views without rows, which all traces share


def memo(trace: Trace, key: str, make: Callable[[Trace], T], *, idle: Callable[[Trace], bool] | None = None) -> T:
    """A view of this trace, made at its first use.

    Args:
        idle: whether the view has no rows, for a reason that a glance tells (`views.absence`). It is then the empty one that was made before.
    """
    if key not in trace.views:
        if idle is None or key not in _EMPTY or not idle(trace):
            made = trace.views[key] = make(trace)
            if idle is not None and isinstance(made, pl.DataFrame):
                _EMPTY.setdefault(key, made.clear())
        else:
            trace.views[key] = _EMPTY[key]
    view: T = trace.views[key]
    return view


_PARSED: Final = {Name.META: "metas", Name.VARIABLE: "variables"}  # frames of a trace, one row a text


def lasting(trace: Trace, kind: Name, key: Hashable, make: Callable[[Trace], T]) -> T:
    """A view of a trace's texts of one kind. Windows of a run that goes on share it for as long as no such text is new."""
    kept: dict[Any, tuple[int, Any]] = trace.lasting
    # Texts of a run that goes on grow under a window that has parsed them: what it makes then is of as many as it has parsed.
    parsed = trace.__dict__.get(_PARSED.get(kind, ""))
    size = len(trace.texts.get(kind, ())) if parsed is None else parsed.height
    found = kept.get(key)
    if found is None or found[0] != size:
        found = kept[key] = size, make(trace)
    view: T = found[1]
    return view


def settled(trace: Trace, kind: Name, key: str, inputs: Sequence[bytes], make: Callable[[], T]) -> T:
    """What follows from these and the trace's texts of one kind; windows share it where these are the same."""
    held: dict[str, Any] = lasting(trace, kind, ("settled", key), lambda _: {})
    if held.get("of") != inputs:
        held["of"], held["view"] = inputs, make()
    view: T = held["view"]
    return view
