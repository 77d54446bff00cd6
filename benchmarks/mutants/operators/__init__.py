"""The operators: `syntax/` changes a program's source, `process/` wraps torch inside of it."""
