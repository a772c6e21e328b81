"""Measures this machine and writes it as a Device and a Cluster of the catalogue."""
