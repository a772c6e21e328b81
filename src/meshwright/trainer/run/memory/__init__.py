"""Copies of a run's state in memory."""
