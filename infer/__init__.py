"""Learns rules from healthy runs: hypotheses, their examples, when each applies, which are worth keeping (TrainCheck §3)."""

from __future__ import annotations
