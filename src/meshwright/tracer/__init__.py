"""Traces the real training step under fake tensors and a fake process group."""
