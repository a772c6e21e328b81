"""A model as data: its architecture and the operators of its blocks."""
