"""What is seen of the running program: losses, what meets what, which model is called, what is computed again."""
