"""Optimizers: what they are given, what they keep, what they are told."""
