"""The last steps of a rank, kept in memory and written when something is found wrong: see `ring`."""
