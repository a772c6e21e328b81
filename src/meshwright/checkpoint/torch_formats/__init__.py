"""Checkpoints of torch: import of torch.save files and distributed checkpoint folders, export of the latter."""
