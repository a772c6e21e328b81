"""Activation checkpointing: wraps each block so that backward recomputes what it does not save."""

from functools import partial
from typing import Any

from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy

from meshwright.parallelism.saved_tensors import BlockActivations
from meshwright.parallelism.tensor.layers import is_partial_sum
from meshwright.parallelism.torch_private.torch_checkpoint import selective_contexts
from meshwright.spec.layout.layout import ActivationCheckpoint, Layout

_MATMULS = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::_grouped_mm",
    "aten::_scaled_mm",
    "meshwright::grouped_matmul_by_loop",
)
_ATTENTION = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "torch_attn::_varlen_attn",
)
_ALL_GATHER = "_c10d_functional::all_gather_into_tensor"
_ALL_TO_ALL = "_c10d_functional::all_to_all_single"
_WAIT = "_c10d_functional::wait_tensor"
_COLLECTIVES = (
    _ALL_GATHER,
    "_c10d_functional::reduce_scatter_tensor",
    "_c10d_functional::all_reduce",
    _ALL_TO_ALL,
    # A compiled block saves the waited result of a collective.
    _WAIT,
)
_LARGEST_MAGNITUDE = "aten::linalg_vector_norm"
"""Of what is rounded to float8: a number for each tensor or row."""
SAVED_OPS = frozenset((*_MATMULS, *_ATTENTION, *_COLLECTIVES, _LARGEST_MAGNITUDE))
"""Ops whose outputs are the most expensive to recompute per byte saved.

Exceptions: outputs that span the whole sequence on each tensor-parallel rank, which are all-gathered inputs (backward
repeats the all-gather anyway) and partial sums (their reduced result is saved); and rows exchanged by expert-parallel
ranks, since K copies of each token, twice, exceed what the block saves without recomputation.
"""


def checkpoint_blocks(
    blocks: nn.ModuleList,
    layout: Layout,
    tp_group: dist.ProcessGroup | None = None,
    ep_group: dist.ProcessGroup | None = None,
    parameter_group: dist.ProcessGroup | None = None,
) -> None:
    """Wrap blocks in place so that they save their input (full) or the outputs of SAVED_OPS (selective) only.

    All-gathers over `tp_group`, all-to-alls over `ep_group`, and all-gathers of parameters inside of blocks, over
    `parameter_group`, are recomputed, not saved. Recomputation restores the random state, so that dropout repeats.
    """
    groups = ((_ALL_GATHER, tp_group), (_ALL_TO_ALL, ep_group), (_ALL_GATHER, parameter_group))
    repeated = frozenset((op, group.group_name) for op, group in groups if group is not None)
    selects = {"context_fn": partial(_contexts, repeated, is_reread=layout.may_split_backward)}
    options: dict[str, dict[str, Any]] = {"selective": selects, "full": {}}
    for index, kind in checkpoints_of(blocks, layout):
        if kind != "none":
            blocks[index] = checkpoint_wrapper(blocks[index], preserve_rng_state=True, **options[kind])


def checkpoints_of(blocks: nn.ModuleList, layout: Layout) -> list[tuple[int, ActivationCheckpoint]]:
    """Return (index in the model, checkpoint kind) of each block of a stage; other stages' are None in `blocks`."""
    numbers = [number for number, block in enumerate(blocks) if block is not None]
    return [(number, layout.checkpoint_of(number, numbers[0])) for number in numbers]


def _contexts(repeated: frozenset[tuple[str, str]], *, is_reread: bool) -> tuple[Any, Any]:
    return selective_contexts(_Policy(repeated), is_reread=is_reread, hooks=BlockActivations.of_running_block())


class _Policy:
    """Callable: whether to save the output of each op of a block, in order of execution."""

    def __init__(self, repeated: frozenset[tuple[str, str]]) -> None:
        """`repeated` are the collectives to recompute, by op and group name."""
        self._repeated = repeated
        self._repeats = False

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Return whether to save it."""
        name = op._schema.name
        is_saved = name in SAVED_OPS
        if name in (_ALL_GATHER, _ALL_TO_ALL):
            self._repeats = (name, args[-1]) in self._repeated
            is_saved = not self._repeats
        elif name == _WAIT:
            # The wait of the collective just before it: collectives.py waits at once.
            is_saved, self._repeats = not self._repeats, False
        elif name in _MATMULS:
            is_saved = not is_partial_sum()
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE
