"""Checks of the nodes of a run: network paths, clocks, limits, versions, and tests between neighbouring nodes."""
