"""Saves, verifies and loads training states as whole folders; converts to and from Hugging Face and torch formats."""
