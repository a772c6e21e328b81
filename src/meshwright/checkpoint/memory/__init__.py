"""Copies of the training state in memory of the nodes, each node's also on the next one, in a checkpoint's format."""
