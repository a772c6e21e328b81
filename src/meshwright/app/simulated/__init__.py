"""Simulations asked for by a command: what is simulated, under which conditions, and what was found."""
