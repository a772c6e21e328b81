"""Memory pools: which memory named uses of a job take, and whether this machine has it."""
