"""Mixtures: which sample of which source each position of a run is, and their dataset."""
