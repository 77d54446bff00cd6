"""Replacing functions: `patches` how, `catalog` which of torch, `usercode` which of the program, `taps` with which hooks."""
