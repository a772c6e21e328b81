"""Discrete-event engine: Trace + Cluster -> Timeline."""
