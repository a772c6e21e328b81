"""Proves layouts: trains a small model of the same architecture and compares it with one process, tensor by tensor."""
