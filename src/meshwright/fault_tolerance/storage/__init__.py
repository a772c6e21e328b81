"""Faults of storage: damaged checkpoints and disks that fail, injected by a chaos run."""
