"""Profiles real steps with torch.profiler and turns the Chrome traces of all ranks into a Timeline."""
