"""Samples of a user's iterable: read by one rank, dealt to all, with their position in the checkpoint."""
