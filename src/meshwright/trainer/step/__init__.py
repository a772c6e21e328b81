"""One training step: build, forward, backward, update."""
