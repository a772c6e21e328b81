"""Constants of memory that no shape gives, one for each kind, with where they come from."""

from meshwright.cost.constants import fixed_constant

WORKSPACE_BYTES = 32 * 2**20
"""Scratch of the matmul library: cuBLAS takes 32 MiB on Hopper and later, once for each of the threads that run forward
and backward (torch's notes on CUDA, cuBLAS workspaces). On an H200 the peaks of 10 of 11 runs were those of the traces
and twice this, to the byte (2026-11-26). None where the host itself computes."""

FRAGMENTATION = {name: fixed_constant(f"fragmentation.{name}") for name in ("expandable", "fixed")}
"""Reserved on the stream that computes and not allocated there: gaps too narrow for the next tensor, as a share of
what comes and goes on it, by the segments of torch's allocator. What other streams hold is counted (footprint_rank.py).
The host's allocator gives back what is free: none there.
"""

LIMIT_SHARE = fixed_constant("fragmentation.at_limit")
"""What a device needs beyond allocated bytes, as a share of them, where segments are expandable: at its limit torch's
allocator unmaps every page without a live byte, and tries again before it runs out of memory."""

SMI_BYTES = fixed_constant("smi_gib") * 2**30
"""What nvidia-smi shows besides reserved bytes, context and the first communicator."""

LOSS_BYTES = {
    "eager": (14.0, 16.0),
    "freed": (12.0, 12.0),
    "freed over tp": (10.0, 8.0),
    "fused": (8.0, 12.0),
    "joined": (4.0, 8.0),
}
"""Bytes of one logit at the peak of the loss, by how it is computed, in a workload of 16 and of 32 bits.

eager: the logit (2), its float32 log-softmax (4), the gradient of that (4) and of the logit in float32 (4). freed: the
same without the logit. freed over tp, our own: the logit, it in float32 and its exponentials; then these, the gradient
in float32, and in 16 bits. fused: the logit, its float32 softmax in place of a copy, the gradient in 16 bits. joined:
the logit and its gradient. In 32 bits a logit is its own copy in float32.
"""

CHUNK_LOSS_BYTES = (6.0, 4.0)
"""Bytes of one logit of a chunk (layout.loss_chunks), in a workload of 16 and of 32 bits: the logit, in 16 bits next to
its exponential in float32."""

KEPT_LOSS_BYTES = {
    "eager": (6.0, 8.0),
    "freed": (4.0, 4.0),
    "freed over tp": (4.0, 4.0),
    "fused": (4.0, 4.0),
    "joined": (2.0, 4.0),
}
"""Bytes of one logit that the loss keeps from its forward to its backward, as in LOSS_BYTES.

eager: the logit and its log-softmax. freed: the log-softmax. freed over tp, fused: the softmax. joined: the gradient.
"""
