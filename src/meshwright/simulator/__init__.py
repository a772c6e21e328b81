"""Discrete-event engine: Trace + Cluster -> Timeline.

Empty until the dry run is built.
"""
