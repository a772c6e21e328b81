"""Processes of ranks: starting them, and how they end."""
