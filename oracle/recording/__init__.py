"""From a command to a recording on disk: processes, generated inputs, and the trusted side with its noise."""
