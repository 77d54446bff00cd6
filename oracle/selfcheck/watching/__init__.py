"""What happens in the watched process: roots, steps, copies of them, and what parts in those."""
