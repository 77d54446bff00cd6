"""What the operating system gives to the processes of a test: a time of day, permissions."""
