"""What a job says: its sections, their rules and their documentation."""
