"""Ranks that do not move: heartbeats, the limit of a step, who ends them and what they leave behind."""
