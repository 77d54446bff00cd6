"""`models/`: of a model at a call; `updates/`: of an update. One file a relation; each registers itself."""
