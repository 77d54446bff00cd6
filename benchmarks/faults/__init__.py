"""What may go wrong around a watched job, done on purpose: `make faults`.

`table` holds the faults, `job` the program that they happen to, `trial` does one and looks at what it changed.
"""
