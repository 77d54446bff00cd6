"""Which models there are, how they are called, and what they begin with."""
