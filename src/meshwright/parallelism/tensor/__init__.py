"""Tensor and sequence parallelism, and the loss over a split vocabulary."""
