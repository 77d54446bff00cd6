"""Habits of one kind of program, one relation a file: held where all its recorded runs keep them, and never shipped (`views/habits.py`)."""
