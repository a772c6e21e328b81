"""Whether a step can end and means what it says: deadlocks, mismatches, races."""
