"""Where a plan's tensor parallelism is read from; one way a file. Each adds rules to a plan, and says in lines what it cannot."""
