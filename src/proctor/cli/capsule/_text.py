"""Text of capsule files, as a terminal may show it."""

from __future__ import annotations


def clean(text: str) -> str:
    """Without control characters: a terminal must not be steered by what a file says."""
    return "".join(c if c.isprintable() else "�" for c in text)
