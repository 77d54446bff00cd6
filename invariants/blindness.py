"""What ends in a trace when an error of ours switches a part of the observer off.

The observer writes pairs into `process.json`, the checker reads them::

    "blind": [["states", 12], ["values batch", 30]]

A pair says what is recorded no more, and the step in which that began (-1: before training). Rules that need it are UNKNOWN from there.
When the writer itself is what ended, `process.json` may not be written any more: a file beside it, `blind`, then holds the step (`trace/process.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from proctor.invariants.schema import ALL_ENDED

if TYPE_CHECKING:
    from proctor.invariants.relations import Needs

ALL: Final = ALL_ENDED
CALLS: Final = "calls"
STATES: Final = "states"
VALUES: Final = "values "  # and the name of a `schema.Value` in lower case


def hides(what: str, needs: Needs) -> bool:
    """Whether rules with these needs cannot be judged without it; what a later version adds hides everything."""
    if what == CALLS:
        return bool(needs.functions)
    if what == STATES:
        return bool(needs.states)
    if what.startswith(VALUES):
        return what.removeprefix(VALUES) in needs.values
    return True


def words(what: str) -> str:
    """What is missing, as part of a sentence."""
    if what.startswith(VALUES):
        return f"{what.removeprefix(VALUES)} values"
    return {CALLS: "some functions", STATES: "parameters, gradients, buffers and optimizer state"}.get(what, "anything")
