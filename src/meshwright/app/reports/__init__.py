"""Commands that look back at runs and steps: `report`, `compare`, `profile`, `diagnose`."""
