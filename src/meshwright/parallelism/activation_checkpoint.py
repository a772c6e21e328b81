"""Activation checkpointing: which of a block's intermediate tensors are kept for backward."""

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from meshwright.spec.layout import ActivationCheckpoint

_aten = torch.ops.aten
_SAVED_OPS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)
"""Ops whose outputs cost the most to compute again for the bytes they take."""


def _save_matmuls(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_save_matmuls)


def checkpoint_blocks(blocks: nn.ModuleList, policy: ActivationCheckpoint) -> None:
    """Wrap each block in place so that it saves its input (full) or its matmul outputs (selective) only."""
    if policy == "none":
        return
    options: dict[str, Any] = {"context_fn": _selective_contexts} if policy == "selective" else {}
    for index, block in enumerate(blocks):
        blocks[index] = checkpoint_wrapper(block, **options)
