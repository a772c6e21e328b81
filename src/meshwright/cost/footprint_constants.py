"""Constants of memory that no shape gives, one for each kind, with where they come from."""

WORKSPACE_BYTES = 64 * 2**20
"""Scratch of the matmul library and small tensors: cuBLAS takes 32 MiB on Hopper and later, once for each of the
compute and the backward stream (torch's notes on CUDA, cuBLAS workspaces)."""

FRAGMENTATION = 0.04
"""Reserved and not allocated, as a share of all that comes and goes in a step; 2 to 8 % is usual."""

LOGIT_BYTES = {"eager": 14.0, "compiled": 12.0, "fused": 8.0}
"""Bytes of one logit in a 16-bit workload at the peak of the loss, by kernels.

eager: the logit (2), its float32 log-softmax (4), the gradient of that (4) and of the logit in float32 (4). compiled:
the two gradients are one. fused: the logit, its float32 softmax in place of a copy, the gradient in 16 bits.
"""
