"""How each model family names and arranges its tensors, one table for both directions."""
