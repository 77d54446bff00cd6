"""One invocation: its directory, confirmation in a fresh process, and scripts that stand alone."""
