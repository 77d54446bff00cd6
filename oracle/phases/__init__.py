"""Other phases of a program than its training steps: evaluation between them, and programs that only run forwards."""
