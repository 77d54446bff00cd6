"""Whatever a file of ours or of others holds, its reader gives an answer or one of our errors, soon and in little memory: `make fuzz`.

`inputs` makes sound files and reads them, `mutate` breaks them, `run` does so in a process of its own and looks at it.
"""
