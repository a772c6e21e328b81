"""A run: its folder, its record, its loop."""
