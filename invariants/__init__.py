"""The language that both engines speak: relations, conditions, packs, violations, traces. Runs without torch."""

from __future__ import annotations
