"""The memory of a rank, class by class, at each moment that may be its peak."""
