"""Faults that are put into a run: drawn, noted, and brought about in a rank."""
