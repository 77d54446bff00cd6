"""Operators that wrap torch inside of the program. One group a file; torch is given, never imported here."""
