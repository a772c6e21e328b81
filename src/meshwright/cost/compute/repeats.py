"""Repeats: the shares of a block's backward that compiled code computes whole in both parts of one that is split.

    one graph              all of it
    experts stay eager     attention and matmuls outside experts, and what tp sends for them
    a ring stays eager     what is outside attention

What stays eager is split (parallelism/compile_blocks.py). Ignored: that attention's rotary embedding and a router's
casts, compiled next to eager experts, are repeated, and that norms and sums around an eager ring are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from meshwright.cost.arrays import Bools, Floats, Ints
from meshwright.cost.block_positions import BlockPosition
from meshwright.cost.compute.block_time import BlockTimes
from meshwright.cost.layout_table import CONTEXT_METHODS, LayoutTable
from meshwright.cost.pipeline.stage import split_share
from meshwright.cost.training_setup import Configurations
from meshwright.cost.work import BLOCK, BlockTable
from meshwright.spec.model.model_spec import ModelSpec
from meshwright.spec.model.op import GroupedMatmul

_RING = CONTEXT_METHODS.index("ring")


@dataclass(frozen=True)
class Repeats:
    """Shares of the backwards of a position's blocks that run twice, one element a configuration."""

    matmul: Floats
    attention: Floats
    memory: Floats
    tp: Floats
    cp: Floats
    ep: Floats


class RepeatPricer:
    """Finds what of a block position is repeated."""

    def __init__(self, configs: Configurations, blocks: BlockTable) -> None:
        self.layouts, self.blocks = configs.layouts, blocks
        self.passes = _repeated_passes(configs)
        """Share of the backwards of compiled blocks that run in both parts."""

    def at(self, position: BlockPosition, times: BlockTimes) -> Repeats:
        """Return the shares of a position's backward; `times` say which of its matmuls are whose."""
        blocks, row = self.blocks, position.row
        twice = self.passes * (position.kind == BLOCK)
        experts = np.where(has_eager_experts(blocks, row), 1.0, 0.0)
        ring = np.where(has_ring(self.layouts), 1.0, 0.0)
        of_experts, of_attention = times.expert_share[row], times.attention_share[row]
        # Row-parallel matmuls have two collectives each; what more there are, split experts gather and scatter.
        collectives = np.maximum(blocks.num_tp_collectives[row], 1)
        outside = np.minimum(2 * blocks.num_tp_inputs[row] / collectives, 1.0)
        return Repeats(
            matmul=twice * (1 - experts * of_experts - ring * of_attention),
            attention=twice * (1 - ring),
            memory=twice * (1 - experts),
            tp=twice * np.where(experts > 0, outside, 1.0) * (1 - ring * np.minimum(2 / collectives, 1.0)),
            cp=twice * (1 - ring),
            ep=0.0 * twice,
        )


def repeated_share(configs: Configurations) -> Floats:
    """Return the share of a pipeline's backwards, by FLOPs, that compiled blocks compute twice, once in each part."""
    return _repeated_passes(configs) * compiled_share(configs)


def compiled_share(configs: Configurations) -> Floats:
    """Return the share of blocks' FLOPs in what is compiled where blocks are."""
    flops = [_flops(setup.model, setup.workload.seq_len) for setup in configs.setups]
    experts, attention = np.array(flops)[configs.setup_index].T
    layouts = configs.layouts
    is_ours = configs.has(lambda setup: setup.is_own)
    stays = (layouts.ep > 1) | (layouts.tp > 1)
    eager = np.where(stays, experts, 0.0) + np.where(has_ring(layouts), attention, 0.0)
    return np.where(is_ours, 1 - eager, 1.0)


def has_eager_experts(blocks: BlockTable, row: Ints) -> Bools:
    """Return where experts stay out of a compiled block."""
    return np.asarray(blocks.eager_backward_elements[row] > 0)


def has_ring(layouts: LayoutTable) -> Bools:
    """Return where attention stays out of a compiled block, since it passes keys on around a ring."""
    return np.asarray((layouts.cp > 1) & (layouts.cp_method == _RING))


def _repeated_passes(configs: Configurations) -> Floats:
    repeats = configs.each(lambda setup: float(setup.stack.repeats_compiled_backward))
    return np.asarray(
        repeats * configs.layouts.compiles_blocks * split_share(configs.layouts, configs.num_microbatches)
    )


@lru_cache(maxsize=64)
def _flops(model: ModelSpec, seq_len: int) -> tuple[float, float]:
    """Return the shares of blocks' FLOPs in their experts, and in attention with its matmuls."""
    ops = [(group.count, op) for group in model.groups[1:-1] for op in group.ops]
    flops = [(op, count * op.forward_flops_per_token(seq_len)) for count, op in ops]
    whole = max(sum(size for _, size in flops), 1)
    experts = sum(size for op, size in flops if isinstance(op, GroupedMatmul))
    attention = sum(size for op, size in flops if op.part == "attention")
    return experts / whole, attention / whole
