"""Numbers and nothing else: floating-point formats, how far two tensors are apart, how much rounding explains, in what way one is wrong.

Everything of the oracle may ask here; nothing here knows of runs, ranks or plans.
"""
