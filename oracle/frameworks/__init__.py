"""What a training framework knows about its own parallelism, read off it: one file per framework.

They find the framework among the modules that the user's program has imported and never import it themselves.
"""
