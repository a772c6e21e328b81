"""Days, failures and cost of a run."""
