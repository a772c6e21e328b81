"""Runs and answers about them: the run folder, plans, budgets, proofs, diagnoses."""
