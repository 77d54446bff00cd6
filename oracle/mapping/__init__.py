"""Which parameters of a candidate are which of a reference where names and shapes say nothing: renamed, fused, transposed.

Found by the values that both begin with, bit for bit, and kept as rules of a plan. What fits in two ways is listed and never guessed.
"""
