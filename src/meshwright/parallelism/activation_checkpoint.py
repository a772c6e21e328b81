"""Activation checkpointing: which of a block's intermediate tensors are kept for backward."""

from functools import partial
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy

from meshwright.parallelism.torch_checkpoint import selective_contexts
from meshwright.spec.layout import Layout

_MATMULS = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::_grouped_mm",
    "meshwright::grouped_matmul_by_loop",
)
_ATTENTION = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
)
_COLLECTIVES = (
    "_c10d_functional::all_gather_into_tensor",
    "_c10d_functional::reduce_scatter_tensor",
    "_c10d_functional::all_reduce",
    "_c10d_functional::all_to_all_single",
    # What a compiled block keeps is what its collectives have become when they are done.
    "_c10d_functional::wait_tensor",
)
SAVED_OPS = frozenset((*_MATMULS, *_ATTENTION, *_COLLECTIVES))
"""Ops whose outputs cost the most to make again, in arithmetic or in communication, for the bytes that they take."""


def checkpoint_blocks(blocks: nn.ModuleList, layout: Layout) -> None:
    """Wrap blocks in place so that they keep their input (full) or the outputs of SAVED_OPS (selective) only.

    Recomputation draws the random numbers of the first time, so that dropout drops the same.
    """
    selects = {"context_fn": partial(selective_contexts, _policy, is_reread=layout.may_split_backward)}
    options: dict[str, dict[str, Any]] = {"selective": selects, "full": {}}
    for index, block in enumerate(blocks):
        # The other stages' blocks are None here, and count: which blocks are wrapped depends on the model only.
        if block is not None and (kind := layout.checkpoint_of(index)) != "none":
            blocks[index] = checkpoint_wrapper(block, preserve_rng_state=True, **options[kind])


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op._schema.name in SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE
