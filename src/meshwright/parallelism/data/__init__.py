"""Data parallelism: FSDP2, HSDP, DDP, initial weights, buffers."""
