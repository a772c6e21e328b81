"""Numbers that a program reads from tensors, although fake tensors have no values."""
