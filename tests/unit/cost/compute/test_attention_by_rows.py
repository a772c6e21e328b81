"""Attention without a kernel: its FLOPs and bytes, and the same price for a trace and for the planner."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cost_configs import configs, training_setup
from meshwright.cost.achieved_rates import peaks_of, rates_of
from meshwright.cost.blocks.block_table import BLOCK
from meshwright.cost.blocks.work import work_of
from meshwright.cost.compute.context_attention import ContextAttention
from meshwright.cost.compute.matmul import AttentionByRows
from meshwright.cost.compute.op_shapes import op_flops
from meshwright.cost.compute.op_time import op_seconds
from meshwright.cost.constants import fitted_constants
from meshwright.cost.stack_factors import stacks_of
from meshwright.cost.step_times import step_times
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.op import ATTENTION_SCORES_AT_ONCE
from meshwright.spec.trace.trace import Signature, TensorShape

HEADS, KV_HEADS, WIDTH, POSITIONS = 32, 8, 128, 8192
RING = Layout(dp_shard=4, cp=2, cp_method="ring")


def piece(queries: int, keys: int) -> AttentionByRows:
    sizes = (1, queries, keys, HEADS, KV_HEADS, WIDTH)
    return AttentionByRows(*(np.array(float(size)) for size in sizes))


def signature(queries: int, keys: int, *, is_backward: bool) -> Signature:
    """Return the operator that a trace has of such a piece."""
    query, key = (TensorShape(dtype="bfloat16", dims=dims) for dims in ((1, queries, 32, 128), (1, keys, 8, 128)))
    result = TensorShape(dtype="float32", dims=query.dims)
    name = f"meshwright.attention_by_rows{'_backward' if is_backward else ''}.default"
    return Signature(op=name, inputs=(query, key, key), outputs=(result,), is_causal=True)


def test_no_score_is_left_out() -> None:
    flops = [op_flops(signature(256, 512, is_backward=is_backward)) for is_backward in (False, True)]
    forward = 2 * 2 * HEADS * 256 * 512 * WIDTH
    assert flops == [forward, 2.5 * forward]


def test_each_block_holds_so_many_scores() -> None:
    assert piece(POSITIONS, POSITIONS).num_blocks == HEADS * POSITIONS**2 / ATTENTION_SCORES_AT_ONCE
    assert piece(8, 8).num_blocks == 1


def test_products_take_their_flops_and_passes_their_bytes() -> None:
    rows, (rate, memory) = piece(POSITIONS, POSITIONS), (np.array(60e12), np.array(3e12))
    forward, backward = rows.products_s(rate, memory, np.array(132.0), 1.0)
    ideal = 2 * HEADS * POSITIONS**2 * WIDTH / rate
    # Blocks of a few rows leave processors without a tile.
    assert 2 * ideal < forward < 6 * ideal
    assert 5 * ideal < backward < 12 * ideal
    passes_f, passes_b = rows.passes_s(memory, 0.0)
    assert passes_f == pytest.approx(9 * 4 * HEADS * POSITIONS**2 / memory)
    sums = 3 * 4 * 2 * KV_HEADS * WIDTH * POSITIONS * rows.num_blocks
    assert passes_b == pytest.approx((15 * 4 * HEADS * POSITIONS**2 + sums) / memory)


@pytest.mark.parametrize("cluster", ["h100-ib400", "gb200-nvl72"])
def test_a_ring_costs_what_its_traced_operators_do(cluster: str) -> None:
    given = training_setup("llama3-8b", cluster, "meshwright", seq_len=2 * POSITIONS)
    given = replace(given, workload=given.workload.replace(masks_documents=True))
    table, constants = configs(given, RING), fitted_constants()
    blocks = work_of(table).blocks
    block = np.flatnonzero(blocks.kind == BLOCK)
    rates = rates_of((given,), peaks_of((given,)), constants)
    split = ContextAttention(table, blocks)
    products, others = split.rows_s(block, rates.matmul32, rates.memory, constants)
    slow = stacks_of(table).factors(constants)
    for is_backward in (False, True):
        pieces = [signature(*size, is_backward=is_backward) for size in ((8192, 8192), (4096, 8192))]
        traced = op_seconds(pieces, given.cluster.device).sum()
        priced = slow.compute * (products[is_backward] + slow.overhead * others[is_backward])
        assert priced == pytest.approx(traced, rel=0.02)


def test_only_pieces_without_a_kernel_go_by_rows() -> None:
    plain = training_setup("llama3-8b", stack="meshwright")
    documents = replace(plain, workload=plain.workload.replace(masks_documents=True))
    wide = replace(plain, workload=plain.workload.replace(precision="float32"))
    gathered = RING.replace(cp_method="all-gather")
    by_rows = [
        bool(ContextAttention(table, work_of(table).blocks).by_rows[0])
        for table in (configs(one, layout) for one in (plain, documents, wide) for layout in (RING, gathered))
    ]
    assert by_rows == [False, False, True, False, True, False]
    flash, slow = (step_times(configs(one, RING)).total_s[0] for one in (plain, documents))
    assert slow > 2 * flash
