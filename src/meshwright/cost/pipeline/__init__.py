"""Stages, their passes and the replay of a schedule."""
