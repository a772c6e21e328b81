"""What torch.distributed does under a fake process group, recorded as it would be under NCCL."""
