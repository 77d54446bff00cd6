"""What crosses a connection between a recorded process and its verifier: Arrow messages, frames, and who may speak."""
