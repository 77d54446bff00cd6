"""Of one model at one real call; one file a relation."""
