"""Which hypotheses become rules: enough evidence (`select`), nothing said twice (`redundant`), right on held-out runs (`crossval`)."""
