"""What several relations look up in a trace, each computed once and kept with it."""
