"""From two recordings to verdicts: of tensors, replicas, buffers, choices, dropout, numbers, and of the whole comparison."""
