"""Training: the step, the loop, the run folder, the launch of local ranks."""
