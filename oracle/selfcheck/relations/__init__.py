"""One file a relation of a model or of an update; each registers itself."""
