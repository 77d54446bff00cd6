"""What crosses the edges of modules."""
