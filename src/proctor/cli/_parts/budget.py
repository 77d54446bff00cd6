"""`--budget 1%`: the share of a job's time that being watched may cost, as a number."""

from __future__ import annotations

import re

from proctor.errors import UsageError

DEFAULT = "1%"

_FORM = re.compile(r"(\d{1,3}(?:\.\d{1,4})?)\s*%")


def share_of(text: str | None) -> float:
    """The share that a text means: 0.01 for "1%"; 0.0, no limit, for none.

    Raises:
        UsageError: it is no percentage between 0.01 and 50.
    """
    if text is None or text == "none":
        return 0.0
    found = _FORM.fullmatch(text.strip())
    share = float(found.group(1)) / 100 if found else 0.0
    if not 1e-4 <= share <= 0.5:
        raise UsageError(f"--budget {text}: expected a percentage from 0.01% to 50%, or none")
    return share
