"""Operators that change a program's syntax tree. One group a file."""
