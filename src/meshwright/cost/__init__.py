"""Closed formulas for the time and memory of a step: matmul, attention, collective, footprint, pipeline.

Empty until the planner is built.
"""
