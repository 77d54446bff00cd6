"""The step of a capsule, in a reference that does it again."""
