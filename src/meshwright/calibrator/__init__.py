"""Measures this machine -> Cluster.

Empty until the planner is built.
"""
