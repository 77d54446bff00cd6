"""The native code in plain Python, one file a concept: the fallback without a compiler, and what tests hold the native code against."""
