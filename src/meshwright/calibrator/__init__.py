"""Measures this machine -> Device and Cluster, in the catalogue's own form."""
