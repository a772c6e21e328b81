"""Proves that layouts train what one process trains: a small model of the same architecture, compared name by name."""
