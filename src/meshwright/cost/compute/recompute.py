"""The shares of a block that are computed twice: its forward, recomputed, and parts of its split backward.

    none 0, full 1; selective what Stack.selective says; every n-th block only: 1 / n of
    it, rounded up on each stage; said block by block: the mean over all blocks
    half of matmul outputs kept: every second matmul, but not the last one
    outputs of cuDNN's attention not kept (torchtitan of 2025, on Blackwell): attention
    sums of row-parallel matmuls kept, not their terms (ours under tp): in eager code those matmuls, but for the last
    compiled selective blocks of ours on a device: of memory-bound work, what kernels of its own repeat (recomputation),
    and what kernels of backward repeat, which read the same tensors anyway (memory-bound ops)
    full, where it stops early: without the last matmul of the block, and the collective that follows it, unless these
    are in a graph with what is needed, as where a block's network is compiled alone, next to eager attention

Collectives are done again where the whole forward pass is, and experts' all-to-alls wherever ours recompute. Source of
the early stop: torch.utils.checkpoint since torch 2.1; counted in torch 2.13, 2026-11-21: 8.4 instead of 12.6 MFLOP of
a GELU block. Of the halves: torchtitan's policy.
Ignored: that the last block before the loss, which is still in memory, need not be; that a pipeline goes at the pace of
the stage that computes most again.

Repeats: the shares of a block's backward that compiled code computes whole in both parts of one that is split:

    one graph              all of it
    experts stay eager     attention and matmuls outside experts, and what tp sends for them
    attention stays eager  the network alone: in a ring, or by a backend that skips masked scores

What stays eager is split (parallelism/compile_blocks.py). Ignored: that attention's rotary embedding and a
router's casts, compiled next to eager experts, are repeated.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from meshwright.cost.achieved_rates import is_blackwell
from meshwright.cost.blocks.block_positions import BlockPosition
from meshwright.cost.blocks.block_table import BLOCK, BlockTable
from meshwright.cost.compute.block_time import BlockTimes
from meshwright.cost.constants import fixed_constant
from meshwright.cost.layout_table import ACTIVATION_CHECKPOINTS, Bools, Floats, Ints, LayoutTable
from meshwright.cost.pipeline.stage import split_share
from meshwright.cost.training_setup import Configurations, TrainingSetup
from meshwright.spec.model.model_spec import ModelSpec
from meshwright.spec.model.op import GroupedMatmul

_SELECTIVE = {
    "matmul-outputs": (0.0, 0.0, 1.0),
    "half-of-matmul-outputs": (0.0, 0.0, 1.0),
    "core-attention": (0.0, 1.0, fixed_constant("selective_memory")),
}
"""Shares of matmuls, attention and memory-bound ops by what a stack calls selective."""
_OWN_KERNELS, _FUSED = fixed_constant("compiled_recompute.own_kernels"), fixed_constant("compiled_recompute.fused")


@dataclass(frozen=True)
class Recomputed:
    """Shares between 0 and 1, one element a configuration."""

    matmul: Floats
    attention: Floats
    memory: Floats
    collectives: Floats
    stops_early: Floats
    """1 where the last matmul of a block is left out, else 0."""
    second_matmuls: Floats
    """Share of every second matmul."""
    terms: Floats
    """Share of the row-parallel matmuls whose sum over tp ranks is kept in place of them."""
    exchanges: Floats
    """Share of experts' all-to-alls."""
    whole: Floats
    """Share of blocks that recompute all of forward."""
    own_kernels: Floats
    """Share of the others' memory-bound work in kernels that do nothing else."""
    fused: Floats
    """Share of memory-bound work that compiled kernels of backward take longer by, of what they repeat."""

    def of_matmuls(self, last_share: Floats, second_share: Floats, terms_share: Floats) -> Floats:
        """Return the share of a block's matmuls, the last of which is `last_share` of them, or 0 if it is needed, every
        second one `second_share`, and the row-parallel ones but the last `terms_share`.
        """
        whole = self.matmul * (1 - self.stops_early * last_share)
        return whole + self.second_matmuls * second_share + self.terms * terms_share

    def of_collectives(self, num_collectives: Floats, last_share: Floats) -> Floats:
        """Return the share of a block's equal tensor-parallel collectives."""
        left_out = self.stops_early * (last_share > 0)
        return np.asarray(self.collectives * (1 - left_out / np.maximum(num_collectives, 1)), np.float64)


def recomputed_of(configs: Configurations) -> Recomputed:
    """Return what each configuration recomputes."""
    full, selective = share_of_blocks(configs, "full"), share_of_blocks(configs, "selective")
    by_setup = np.array([_SELECTIVE[setup.stack.selective] for setup in configs.setups])[configs.setup_index]
    by_setup[:, 1] = np.maximum(by_setup[:, 1], configs.each(lambda setup: float(drops_attention(setup))))
    matmul, attention, memory = (full + selective * share for share in by_setup.T)
    stops = (full > 0) & configs.has(lambda setup: setup.stack.recompute_stops_early)
    stops &= ~(configs.layouts.compiles_blocks & configs.layouts.has_eager_attention & configs.has(_is_own))
    halves = selective * configs.has(lambda s: s.stack.selective == "half-of-matmul-outputs")
    keeps_sums = configs.each(lambda s: float(s.stack.gathers_input_again and s.stack.selective == "matmul-outputs"))
    terms = selective * keeps_sums * ~configs.layouts.compiles_blocks
    exchanges = full + selective * keeps_sums
    is_fused = configs.layouts.compiles_blocks & configs.has(_fuses_recomputed)
    own_kernels = np.where(is_fused, selective * _OWN_KERNELS, memory - full)
    fused = np.where(is_fused, selective * _FUSED, 0.0)
    early = stops.astype(np.float64)
    return Recomputed(matmul, attention, memory, full, early, halves, terms, exchanges, full, own_kernels, fused)


def _is_own(setup: TrainingSetup) -> bool:
    return setup.is_own


def _fuses_recomputed(setup: TrainingSetup) -> bool:
    """Return whether its compiled backward repeats memory-bound work as was counted: ours, on a device.

    On a host evaluated functions take the time, not bytes; other software's whole share is what its runs were fitted
    with.
    """
    return setup.is_own_on_device and setup.stack.selective == "matmul-outputs"


def drops_attention(setup: TrainingSetup) -> bool:
    """Return whether selective recomputation does not save attention's output, and so runs attention again."""
    runs_cudnn = is_blackwell(setup.cluster.device)
    return runs_cudnn and not setup.stack.saves_cudnn_attention


def share_of_blocks(configs: Configurations, policy: str) -> Floats:
    """Return the share of all blocks that save what `policy` says."""
    layouts, code = configs.layouts, ACTIVATION_CHECKPOINTS.index(policy)
    if layouts.checkpoint_of_block is not None:
        return np.asarray((layouts.checkpoint_of_block == code).mean(axis=1))
    num_blocks = configs.each(lambda setup: float(sum(group.count for group in setup.model.groups[1:-1])))
    return np.where(layouts.activation_checkpoint == code, nth_share(layouts, num_blocks), 0.0)


def nth_share(layouts: LayoutTable, num_blocks: Floats) -> Floats:
    """Return the share of its blocks that recomputing every n-th takes on the stages with most: it counts from the
    first block of each.
    """
    per_stage = np.ceil(num_blocks / layouts.num_stages)
    return np.asarray(np.ceil(per_stage / layouts.activation_checkpoint_every) / per_stage)


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
        eager = np.where(self.layouts.has_eager_attention, 1.0, 0.0)
        of_experts, of_attention = times.expert_share[row], times.attention_share[row]
        # Row-parallel matmuls have two collectives each; what more there are, split experts gather and scatter.
        collectives = np.maximum(blocks.num_tp_collectives[row], 1)
        outside = np.minimum(2 * blocks.num_tp_inputs[row] / collectives, 1.0)
        return Repeats(
            matmul=twice * (1 - experts * of_experts - eager * of_attention),
            attention=twice * (1 - eager),
            memory=twice * (1 - experts) * blocks.network_share[row],
            tp=twice * np.where(experts > 0, outside, 1.0) * (1 - eager * np.minimum(2 / collectives, 1.0)),
            cp=twice * (1 - eager),
            ep=0.0 * twice,
        )


def repeated_share(configs: Configurations) -> Floats:
    """Return the share of a pipeline's backwards, by FLOPs, that compiled blocks compute twice, once in each part."""
    return _repeated_passes(configs) * compiled_share(configs)


def compiled_share(configs: Configurations) -> Floats:
    """Return the share of blocks' FLOPs in what is compiled where blocks are."""
    flops = [_flops(setup.trained_model, setup.workload.seq_len) for setup in configs.setups]
    experts, attention = np.array(flops)[configs.setup_index].T
    layouts = configs.layouts
    is_ours = configs.has(lambda setup: setup.is_own)
    stays = (layouts.ep > 1) | (layouts.tp > 1)
    eager = np.where(stays, experts, 0.0) + np.where(layouts.has_eager_attention, attention, 0.0)
    return np.where(is_ours, 1 - eager, 1.0)


def has_eager_experts(blocks: BlockTable, row: Ints) -> Bools:
    """Return where experts stay out of a compiled block."""
    return np.asarray(blocks.eager_backward_elements[row] > 0)


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
