"""The end of a campaign, for programs: the whole summary as JSON, findings with their scenarios."""

from __future__ import annotations

import msgspec

from proctor.oracle.fuzz.report import Summary


def render(summary: Summary) -> str:
    """JSON text."""
    return msgspec.json.format(msgspec.json.encode({"format": 1, **msgspec.to_builtins(summary)})).decode()
