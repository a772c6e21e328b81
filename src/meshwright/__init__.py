"""Meshwright plans, proves and runs the training of large models on PyTorch."""

__version__ = "0.1.0"
