"""Checkpoints examined by one process: state, damage, differences and statistics."""
