"""Real steps under torch.profiler: their Chrome traces, and the Timeline that those of all ranks make."""
