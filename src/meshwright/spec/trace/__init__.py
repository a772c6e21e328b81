"""Traces and timelines: what each rank does, when it was simulated to do it, and what is wrong with it."""
