"""What the tracer knows of differences between releases of torch, in one place."""

from __future__ import annotations

import torch

SUPPORTED = "torch 2.11 to 2.15"
RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))
ONLY_IN = {
    "record_grad_output_stream": ((2, 15),),
    "_warmup_p2p": ((2, 12), (2, 13), (2, 14)),
    "_initialize_pipeline_distributed_state": ((2, 15),),
}
"""Names that are replaced in some releases only: others have no such attribute."""
JOINS_ALIKE = "2.13"
"""The release whose fused operations were compared with their parts; 2.11 and 2.15 differ (2026-11-23)."""
EFFICIENT_IS_GROUPED = RELEASE >= (2, 14)
"""Whether memory-efficient attention supports fewer heads of keys than of queries."""
_ops = torch.ops._c10d_functional
WAITS_FOR_SEVERAL = (_ops.wait_tensors.default,) if hasattr(_ops, "wait_tensors") else ()
"""The operator that waits for several collectives, since 2.15."""
