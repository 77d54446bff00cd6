"""Of one update and what led to it; one file a relation."""
