"""Judging a run that goes on, step by step: `records` hold the last steps, `memo` knows what looks alike, `online` judges."""
