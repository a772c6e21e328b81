"""Stragglers: own time of each rank by phase, and a robust score against the other ranks."""
