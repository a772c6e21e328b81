"""Devices and clusters: figures with units, sources and dates."""
