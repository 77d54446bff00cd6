"""The oracle: is a distributed run the same computation as its reference? Not built yet."""

from __future__ import annotations
