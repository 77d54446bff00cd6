"""Others' traces and rules as runs and packs: one package a tool."""
