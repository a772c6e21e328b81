"""Real steps under torch.profiler: Chrome traces now, a Timeline with the dry run."""
