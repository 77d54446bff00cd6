"""JSON whose texts are texts: half of a surrogate pair (`"\\ud800"`) is valid JSON and no character, and no file that we write can hold it."""

from __future__ import annotations

import json
from typing import Any


def decode(text: str | bytes) -> Any:
    """What JSON says, NaN and infinities included.

    Raises:
        ValueError: it is no JSON, or one of its texts is none.
        RecursionError: it is nested too deeply.
    """
    said = json.loads(text)
    plain = text if isinstance(text, str) else text.decode(errors="replace")
    if "\\ud" in plain.lower():
        json.dumps(said, ensure_ascii=False).encode()
    return said
