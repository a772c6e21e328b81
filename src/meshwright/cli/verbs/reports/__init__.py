"""The commands that look back at runs and steps."""
