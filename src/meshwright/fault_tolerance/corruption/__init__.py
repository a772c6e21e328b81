"""Silent corruption: comparison of replicas, recomputation of a step, repair."""
