"""Closed formulas for the time and memory of a step: matmul, attention, collective, footprint, pipeline."""
