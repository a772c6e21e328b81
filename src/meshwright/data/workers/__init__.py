"""Processes that read samples for a rank."""
