"""Stages of a pipeline: what a rank holds of a model, in which order it computes microbatches, and parameters that stages share."""
