"""Builds the training step, runs the loop, writes the run folder, launches local ranks."""
