"""Deadlocks, mismatched communication and races in a traced step."""
