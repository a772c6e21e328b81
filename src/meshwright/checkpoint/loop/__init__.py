"""Checkpoints of a training loop of one's own: what of its state is saved, and that all ranks mean the same."""
