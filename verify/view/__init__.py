"""The live view: what a verifier says of a run, and the report of it, in a browser while it goes on."""
