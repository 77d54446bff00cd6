"""Its place puts this folder on the path: tests say `from helpers.runs import write_run`."""
