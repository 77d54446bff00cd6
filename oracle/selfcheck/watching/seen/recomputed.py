"""Whether the program computes something again in its backward passes, and how that is left out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

CHECKPOINTS: Final = {"off": 0, "used": 0}


@contextlib.contextmanager
def uncheckpointed() -> Iterator[list[bool]]:
    """Within: what is checkpointed is not. The list is not empty afterwards if anything was."""
    found: list[bool] = []
    before, CHECKPOINTS["off"], CHECKPOINTS["used"] = dict(CHECKPOINTS), 1, 0
    try:
        yield found
    finally:
        if CHECKPOINTS["used"]:
            found.append(True)
        CHECKPOINTS.update(before)


def maybe_checkpoint(original: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    """In the place of `torch.utils.checkpoint.checkpoint`: counts, and does it or not."""
    CHECKPOINTS["used"] += 1
    if not CHECKPOINTS["off"]:
        return original(function, *args, **kwargs)
    for name in ("use_reentrant", "context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state"):
        kwargs.pop(name, None)
    return function(*args, **kwargs)
