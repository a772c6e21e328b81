"""torch.distributed under a fake process group, recorded as under NCCL."""
