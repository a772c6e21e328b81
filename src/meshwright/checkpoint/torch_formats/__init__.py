"""Checkpoints that torch itself writes: torch.save files and torch.distributed.checkpoint folders, for import only."""
