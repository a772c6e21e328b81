"""Tensor and sequence parallelism: sharding plans and layers."""
