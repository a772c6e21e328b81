"""A run: training loop, metrics, run folder."""
