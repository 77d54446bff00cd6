"""From rows to disk and to the verifier: `rows`, `writer`, `stream`, `ring`, `rundir`."""
