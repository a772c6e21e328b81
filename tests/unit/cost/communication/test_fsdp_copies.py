"""What FSDP2 itself computes, by the bytes and kernels that traces of it have: casts, copies, sums of gradients."""

from __future__ import annotations

import numpy as np
import pytest

from cost_configs import configs, training_setup
from meshwright.cost.blocks.block_positions import block_positions
from meshwright.cost.blocks.block_table import BLOCK
from meshwright.cost.blocks.work import work_of
from meshwright.cost.communication.contention import computing_shares
from meshwright.cost.communication.data_parallel import DataParallel
from meshwright.cost.communication.fsdp_copies import FsdpCopies, added_s, fsdp_copies_s, fsdp_kernels, tied_bytes
from meshwright.cost.stack_factors import StackFactors
from meshwright.spec.layout.layout import Layout

ONE_BYTE_PER_S = np.array(1.0)


def parallel_of(layout: Layout, num_microbatches: int, stack: str = "meshwright") -> tuple[DataParallel, np.ndarray]:
    """Return the data parallelism of one case of so many microbatches, and its block."""
    of = training_setup("llama3-8b", stack=stack, global_batch_size=layout.dp * num_microbatches)
    case = configs(of, layout)
    work = work_of(case)
    return DataParallel(case, work), np.flatnonzero(work.blocks.kind == BLOCK)[:1]


def bytes_of_block(layout: Layout, num_microbatches: int) -> tuple[float, float]:
    """Return the bytes moved for each parameter of a block and microbatch, forward and backward."""
    parallel, block = parallel_of(layout, num_microbatches)
    moved = fsdp_copies_s(parallel, block, ONE_BYTE_PER_S, is_block=True)
    forward, backward = (float(one[0] / parallel.work.blocks.dense_parameters[block][0]) for one in moved)
    return forward, backward


def test_shards_are_added_up_where_each_microbatch_is_reduced() -> None:
    layout = Layout(dp_shard=8, reshard_after_forward="always", gradient_sync="microbatch")
    # Copied out of the gathered buffer, 2 bytes read and written; gradients cast into the reduction's input.
    assert bytes_of_block(layout, 1) == pytest.approx((4, 4 + 2 + 4))
    assert bytes_of_block(layout, 4) == pytest.approx((4, 4 + 2 + 4))
    # Of four microbatches three add a float32 shard, an eighth: two read, one written, on the reductions' stream.
    (parallel, block), expected = parallel_of(layout, 4), 3 / 4 * 12 / 8
    whole = parallel.work.blocks.dense_parameters[block]
    assert added_s(parallel, block, ONE_BYTE_PER_S, 0.0) / whole == pytest.approx(expected, rel=1e-3)
    assert added_s(*parallel_of(layout, 1), ONE_BYTE_PER_S, 0.0) == 0


def test_weights_that_travel_in_float8_are_rounded_next_to_what_computes_unless_alone() -> None:
    def rounded(layout: Layout) -> tuple[float, float]:
        """Return the seconds of both passes' own kernels, and of what precedes a gather, at a byte a second."""
        precision = {"precision": "float8-tensorwise", "global_batch_size": layout.dp}
        case = configs(training_setup("llama3-8b", stack="meshwright", **precision), layout)
        parallel = DataParallel(case, work_of(case))
        position = next(one for one in block_positions(parallel.work) if one.kind == BLOCK)
        slow, weights = StackFactors(*[np.ones(1)] * 3), parallel.work.blocks.low_parameters[position.row][0]
        copies = FsdpCopies(parallel, [position])
        alone = fsdp_copies_s(parallel, position.row, ONE_BYTE_PER_S, is_block=True)[0]
        return float(alone[0]) / weights, float(copies.before_gather_s(position, ONE_BYTE_PER_S, slow)[0]) / weights

    # Scaled, clamped and cast, of 4 bytes: 8, 8 and 5.
    assert rounded(Layout()) == pytest.approx((21, 0))
    assert rounded(Layout(dp_shard=8))[1] == pytest.approx(21 / 8)
    assert rounded(Layout(dp_shard=8))[0] == pytest.approx(2, rel=0.01)


def test_whole_gradients_are_added_up_where_a_step_is_reduced_once() -> None:
    layout = Layout(dp_shard=8, reshard_after_forward="always", gradient_sync="step")
    # One microbatch of four casts its gradients, others add theirs, and one copies the sums: 4 bytes each way.
    of_four = (2 + 4) + 3 * (2 + 4 + 4) + (4 + 4)
    assert bytes_of_block(layout, 4) == pytest.approx((4, 4 + of_four / 4))


def test_graphs_cast_in_each_microbatch_and_add_to_buffers_that_are_zeroed_once() -> None:
    layout = Layout(cuda_graphs=True)
    # Parameters and gradients are cast, 2 and 4 bytes; two float32 numbers are read and one is written.
    for num_microbatches in (1, 4):
        expected = (0, 2 * (2 + 4) + 3 * 4 + 4 / num_microbatches)
        assert bytes_of_block(layout, num_microbatches) == pytest.approx(expected)
    assert fsdp_kernels(*parallel_of(layout, 1)).tolist() == [3 * 9]


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Layout(), 3 * 2),
        (Layout(dp_shard=8), 3 * 2),
        (Layout(cuda_graphs=True), 2 * (2 + 4) + 3 * 4),
        (Layout(compile="model"), 0),
        (Layout(pp=2), 0),
    ],
)
def test_the_gradients_of_a_tied_head_are_added_to_those_of_the_embedding(layout: Layout, expected: float) -> None:
    case = configs(training_setup("qwen3-0.6b", stack="meshwright", global_batch_size=layout.dp), layout)
    parallel = DataParallel(case, work_of(case))
    tied = parallel.work.blocks.tied_parameters
    head = np.flatnonzero(tied)
    assert tied_bytes(parallel, head) / tied[head] == pytest.approx(expected)


def test_each_tensor_is_added_by_a_kernel_of_its_own() -> None:
    """Seven matmuls and two norms."""
    layout = Layout(dp_shard=8, gradient_sync="step")
    assert fsdp_kernels(*parallel_of(layout, 4)).tolist() == [9]
    assert fsdp_kernels(*parallel_of(layout, 1)).tolist() == [0]
    assert fsdp_kernels(*parallel_of(layout, 4, "generic")).tolist() == [0]


@pytest.mark.parametrize(("stack", "expected"), [("meshwright", (0.25, 1.0)), ("generic", (1.0, 1.0))])
def test_our_fsdp_slows_what_is_computed_and_no_waits(stack: str, expected: tuple[float, float]) -> None:
    parallel, _ = parallel_of(Layout(dp_shard=8), 4, stack)
    one, none = np.ones(1), np.zeros(1)
    forward, backward = computing_shares(parallel, (one, none), (4 * one, none))
    assert (forward[0], backward[0]) == expected
