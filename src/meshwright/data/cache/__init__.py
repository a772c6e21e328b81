"""Tokens on disk: made once of each content, and found by it."""
