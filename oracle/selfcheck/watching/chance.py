"""Whether a model draws random numbers beside those of dropout: another type, or another part of the batch, then draws others."""

from __future__ import annotations

from proctor.oracle.selfcheck.watching.fork import random_states
from proctor.oracle.selfcheck.watching.step import Call, Outputs, gap, seeded


def draws_in_training(call: Call, whole: Outputs) -> bool:
    """Whether gradients change with the random numbers, torch's, numpy's or Python's."""
    before = call.random
    seeded(7)
    call.random = random_states()
    try:
        other = call.derive()[1]
    finally:
        call.random = before
    return gap(whole, other).ratio > 1e3
