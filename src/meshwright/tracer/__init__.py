"""Trace the real step under fake tensors and a fake process group."""
