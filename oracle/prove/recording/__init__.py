"""From a running program to tapes: a dispatch mode, hooks of one training step, and functions as ranks of a world that is not there."""
