"""Observing a training process: patches, state, step and rank context, recorder."""

from __future__ import annotations
