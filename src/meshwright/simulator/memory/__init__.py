"""The memory of a simulated step: allocator, liveness, what recomputation would save."""
