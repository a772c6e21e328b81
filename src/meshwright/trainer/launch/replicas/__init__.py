"""Independent replicas as groups of ranks: a launcher that replaces lost ones, and ways to join."""
