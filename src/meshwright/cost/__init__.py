"""Closed formulas for the time and memory of a step: matmuls, attention, collectives, memory, pipeline."""
