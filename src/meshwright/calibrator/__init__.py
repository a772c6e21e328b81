"""Calibration: measures this machine as a Device and a Cluster in the catalogue's format."""
