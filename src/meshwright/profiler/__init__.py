"""Profiles of real steps by torch.profiler: Chrome traces of all ranks, merged into a Timeline."""
