"""Checks runs against packs: verdicts, incidents, reports. Runs without torch."""

from __future__ import annotations
