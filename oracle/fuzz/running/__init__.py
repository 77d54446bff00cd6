"""Scenarios on ranks: worlds that stay, what a rank does, what it sees, and what is said of it."""
