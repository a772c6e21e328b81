"""Builds the train step, runs the loop, writes the run folder, launches the local ranks."""
