"""All ranks and microbatches of a step, extrapolated from a traced subset."""
