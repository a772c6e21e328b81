"""All ranks and microbatches of a step from a few that were traced."""
