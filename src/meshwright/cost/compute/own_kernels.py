"""own_kernels: elementwise kernels that a block of our own trainer launches for one microbatch.

    dense       6 forward and 8 backward where the compiler fuses them, 20 and 24 one operator at a time
    GPT-2's     4 and 6, and 2 backward for each bias; 5 and 7, and 1 for each
    mixture     27 and 13 compiled; 70 and 49 one operator at a time, and 16 and 4 to exchange tokens between ranks
    tp          a copy for each collective, and one operator at a time for each that gathers again
    networks    19 and 22 where only they are compiled, since attention is eager; 13 and 14 more around a mixture
    ends        embedding 1 and 1, under tp 7 and 2; norm and loss 7 and 6, under tp 28 and 11
    loss        in chunks 33 forward for each, 2 backward, of pairs 33 for each; norm 3 and 4
    accuracy    9 forward, in chunks for each; under tp 14
    adapters    2 and 2 for each adapted layer, compiled 1 and 1
    DoRA        15 and 2 for each adapted layer, compiled 3 and 2: norms of rows, the factor and its gradient
    positions   13 forward, for the tables of rotary embedding, once a stage
    float8      what rounds a layer's operands, scales included: _ROUNDING

Counted in traced steps of llama-15m, llama3-8b, GPT-2 and moe-4m on torch 2.13, 2026-11-23. Ignored: further kernels
of latent attention, of shared experts and of attention that is split over cp.
"""

from collections.abc import Sequence

import numpy as np

from meshwright.cost.blocks.block_table import BLOCK, FIRST, LAST, BlockTable
from meshwright.cost.blocks.work import Work
from meshwright.cost.constants import fixed_constant
from meshwright.cost.layout_table import Floats, Ints, LayoutTable, Passes
from meshwright.cost.training_setup import TrainingSetup

_DENSE = {"compiled": (6.0, 8.0), "eager": (20.0, 24.0)}
_WITHOUT_ROPE = {"compiled": (4.0, 6.0), "eager": (5.0, 7.0)}
_BIAS = {"compiled": 2.0, "eager": 1.0}
_MIXTURE = {"compiled": (27.0, 13.0), "eager": (70.0, 49.0)}
_EXCHANGE = (16.0, 4.0)
_EAGER_ATTENTION = (13.0, 14.0)
"""More than of a compiled block, where attention, norms and residual sums are eager."""
_ENDS = {FIRST: ((1.0, 1.0), (7.0, 2.0)), LAST: ((7.0, 6.0), (28.0, 11.0))}
"""Of one rank, and of each of several that share the vocabulary."""
_NORM, _CHUNK = (3.0, 4.0), (33.0, 2.0)
"""Of the last norm; of a chunk of the loss, forward, and of all of them, backward."""
_ACCURACY = (9.0, 14.0)
"""Of the token accuracy (parallelism/losses/token_accuracy.py) forward, of one rank and under tp."""
_POSITIONS = 13.0
_ADAPTER = {"compiled": 1.0, "eager": 2.0}
"""Of an adapter, either way: its rank-wide product is scaled, and its output added, or the gradient that it gives its
input (models/adapted_linear.py). Compiled, what reads the sum adds it up.
"""
_DORA = {"compiled": (3.0, 2.0), "eager": (15.0, 2.0)}
"""Of the norms of a layer's rows without their products, and of the factor (models/adapted_linear.py)."""
_ROWWISE_FORWARD = fixed_constant("rowwise_forward_kernels")
_ROUNDING = {
    "eager": {
        "float8-tensorwise": (11.0, 21.0),
        "float8-rowwise": (28.0, 67.0),
        "float8-rowwise-with-gw-hp": (28.0, 34.0),
        "mxfp8": (64.0, 131.0),
    },
    "compiled": {
        "float8-tensorwise": (2.0, 2.0),
        "float8-rowwise": (_ROWWISE_FORWARD, 5.0),
        "float8-rowwise-with-gw-hp": (_ROWWISE_FORWARD, 3.0),
        "mxfp8": (7.0, 13.0),
    },
}
"""Of one float8 layer."""
_EXPERT_ROUNDING = {"eager": (28.0, 29.0), "compiled": (2.0, 2.0)}
"""Of one grouped matmul of experts in float8."""


def own_kernels(work: Work, setups: Sequence[TrainingSetup]) -> Passes:
    """Return the kernels forward and backward of each row, NaN where the software is another; 0 around blocks."""
    blocks, setup = work.blocks, work.setup_index[work.blocks.key]
    is_ours = np.array([one.is_own for one in setups])[setup]
    is_compiled = np.array([one.stack.kernels != "eager" for one in setups])[setup]
    is_mixture, is_eager = blocks.routed_copies > 0, blocks.eager_forward_elements > 0
    has_exchange = is_mixture & (work.keys.ep[blocks.key] > 1)
    is_block = blocks.attention_flops > 0
    is_outside = is_compiled & work.keys.has_eager_attention[blocks.key]

    def of_block(kernels: str, way: int) -> Floats:
        plain = np.where(blocks.has_rope > 0, _DENSE[kernels][way], _WITHOUT_ROPE[kernels][way])
        return np.asarray(plain + way * _BIAS[kernels] * blocks.num_biases)

    def count(way: int) -> Floats:
        dense = np.where(is_compiled, of_block("compiled", way), of_block("eager", way))
        mixture = np.where(is_eager, _MIXTURE["eager"][way], _MIXTURE["compiled"][way]) + has_exchange * _EXCHANGE[way]
        copies = blocks.num_tp_collectives + np.where(is_compiled, 0.0, way * blocks.num_tp_inputs)
        around = np.where(is_outside, _EAGER_ATTENTION[way], 0.0)
        kernels = (np.where(is_mixture, mixture, dense) + around + copies) * is_block
        of_kernels = "compiled", "eager"
        is_joined = is_compiled & ~is_outside
        adapters = np.where(is_joined, *(_ADAPTER[one] for one in of_kernels)) * blocks.num_adapters
        norms = np.where(is_joined, *(_DORA[one][way] for one in of_kernels)) * blocks.num_row_norms
        kernels = kernels + adapters + norms
        return np.where(is_ours, kernels + rounding[way], np.nan)

    rounding = _rounding_kernels(work, setups)
    return count(0), count(1)


def _rounding_kernels(work: Work, setups: Sequence[TrainingSetup]) -> Passes:
    """Return the kernels forward and backward that round the operands of float8 layers, of each row."""
    blocks, setup, none = work.blocks, work.setup_index[work.blocks.key], (0.0, 0.0)
    of_layer = {
        kernels: np.array([by_recipe.get(one.own_float8, none) for one in setups])[setup].T
        for kernels, by_recipe in _ROUNDING.items()
    }
    is_compiled = np.array([one.stack.kernels != "eager" for one in setups])[setup]
    is_outside = ~is_compiled | work.keys.has_eager_attention[blocks.key]
    around, inside = blocks.num_low_around_attention, blocks.num_low_matmuls - blocks.num_low_around_attention
    is_eager = blocks.eager_forward_elements > 0
    forward, backward = (
        around * np.where(is_outside, of_layer["eager"][way], of_layer["compiled"][way])
        + inside * np.where(is_compiled, of_layer["compiled"][way], of_layer["eager"][way])
        + blocks.num_low_experts * np.where(is_eager, *(_EXPERT_ROUNDING[one][way] for one in _EXPERT_ROUNDING))
        for way in (0, 1)
    )
    return forward, backward


def end_kernels(work: Work, setups: Sequence[TrainingSetup]) -> Passes:
    """Return the kernels of our own trainer's embedding, last norm and loss, forward and backward; 0 of blocks.

    They are launched while the host is ahead, so that they are not CPU-bound.
    """
    blocks, has_tp, chunks = work.blocks, work.keys.tp[work.blocks.key] > 1, work.keys.loss_chunks[work.blocks.key]
    is_last, setup = blocks.kind == LAST, work.setup_index[work.blocks.key]
    has_chunks, chunks = is_last & (chunks > 1), np.maximum(chunks, 1)
    counts = np.array([one.is_own and one.workload.counts_accuracy for one in setups])[setup]
    are_pairs = np.array([one.is_own and one.workload.pairs_answers for one in setups])[setup]
    accuracy = is_last * counts * chunks * np.where(has_tp, *reversed(_ACCURACY))

    def count(way: int) -> Floats:
        of_kind = [
            (blocks.kind == kind) * (np.where(has_tp, shared[way], alone[way]) + blocks.num_tp_collectives)
            for kind, (alone, shared) in _ENDS.items()
        ]
        of_chunks = np.where(are_pairs, _CHUNK[0] * chunks, _CHUNK[1]) if way else _CHUNK[0] * chunks
        in_chunks = _NORM[way] + of_chunks + blocks.num_tp_collectives
        kernels = np.where(has_chunks, in_chunks, np.asarray(sum(of_kind), np.float64))
        return kernels if way else kernels + accuracy

    return count(0), count(1)


def position_kernels(blocks: BlockTable, row: Ints, layouts: LayoutTable, num_blocks: Floats) -> Floats:
    """Return a block's share of the kernels of our own trainer that make the tables of rotary embedding on a stage."""
    is_turned = (blocks.kind[row] == BLOCK) & (blocks.has_rope[row] > 0)
    return np.where(is_turned, _POSITIONS * layouts.num_stages / num_blocks, 0.0)
