"""Formulas of numbers, read from the source of what runs and never executed. `scalar` learns from them."""
