"""What a device computes: matmuls, attention, memory-bound operators, recomputation."""
