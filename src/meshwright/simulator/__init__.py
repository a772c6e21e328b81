"""Discrete-event simulation: traces and a cluster to a timeline."""
