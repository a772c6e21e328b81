"""Data parallelism: FSDP2, HSDP, DDP, and gradients."""
