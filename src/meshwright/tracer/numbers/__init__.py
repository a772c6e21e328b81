"""Numbers that a program reads while fake tensors hold none."""
