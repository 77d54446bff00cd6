"""Where the packs lie that come with Proctor."""

from __future__ import annotations

from pathlib import Path


def shipped() -> list[Path]:
    """Packs that come with Proctor."""
    return sorted((Path(__file__).parent / "packs").glob("*.json"))
