"""What FSDP itself computes: casts of shards, copies out of and into the buffers of its collectives, sums of gradients.

    gathers     2 bytes moved for each byte gathered, again in backward where blocks are freed
    rounded     what scales, clamps and casts shards that are gathered in float8 (ours), next to what computes but on a
                rank alone
    cast        what casts and copies shards of 16 bits before the ends of the model are gathered (ours); that of blocks
                hides, as it runs on a stream of its own, but in a model's graph, where it computes as all else does
    kept        2 bytes for each byte of the copy that a group of ranks keeps of what it frees
    reductions  a microbatch's gradients cast, added up and copied into the reduction's input
    added       shards of gradients that are reduced in each microbatch, next to what computes (ours)
    tied        autograd's sum of the two gradients of a tied embedding, in each microbatch (ours)

Counted from traces of FSDP2. Ignored: that kernels next to those that compute take bandwidth from them.
"""

from dataclasses import dataclass

import numpy as np

from meshwright.cost.blocks.block_positions import BlockPosition
from meshwright.cost.blocks.block_table import BLOCK, FIRST
from meshwright.cost.communication.data_parallel import (
    DataParallel,
    dense_parameters,
    saved_gather_bytes,
    trained_dense_parameters,
)
from meshwright.cost.compute.block_time import BlockTimes
from meshwright.cost.compute.float8_matmuls import ROUNDED_FLOAT32_BYTES
from meshwright.cost.layout_table import Bools, Floats, Ints, Passes
from meshwright.cost.memory.host_memory import sums_on_host
from meshwright.cost.stack_factors import StackFactors

_MASTER_BYTES = 4.0
"""Of a parameter as the optimizer keeps it."""


@dataclass(frozen=True)
class FsdpCopies:
    """Prices what FSDP itself computes for one microbatch."""

    parallel: DataParallel
    positions: list[BlockPosition]

    def at(self, position: BlockPosition, memory_rate: Floats, slow: StackFactors, kernel_s: float) -> Passes:
        """Return the seconds of a position, forward and backward."""
        forward, backward = fsdp_copies_s(self.parallel, position.row, memory_rate, is_block=position.kind == BLOCK)
        # Multipliers of other software were fitted to whole steps with copies that nothing slows.
        slower = np.where(self.parallel.is_own, slow.compute * slow.overhead, 1.0)
        backward = backward + kernel_s * fsdp_kernels(self.parallel, position.row)
        backward = backward + tied_bytes(self.parallel, position.row) / memory_rate
        forward = forward + kernel_s * _whole_kernels(self.parallel, position.row)
        # A model's graph has one stream; what is reduced last is added up when nothing is left to compute.
        is_exposed = self.parallel.layouts.compiles_model | (position.kind != BLOCK)
        backward = backward + is_exposed * added_s(self.parallel, position.row, memory_rate, kernel_s)
        if self.parallel.layouts.compiles_model.any():
            cast_s, again = self._cast_in_graph_s(position, memory_rate, kernel_s)
            forward, backward = forward + cast_s, backward + again * cast_s
        return forward * slower, backward * slower

    def _cast_in_graph_s(self, position: BlockPosition, memory_rate: Floats, kernel_s: float) -> tuple[Floats, Floats]:
        """Return the seconds in which a model's graph casts the shards of a position before it gathers them, tensor by
        tensor, and whether it does so in backward again.
        """
        dp, row = self.parallel, position.row
        is_here = dp.layouts.compiles_model & (dp.layouts.fsdp > 1) & dp.is_own & dp.shards_parameters
        seconds = dp.shard(row) * (_MASTER_BYTES + dp.element_bytes) / memory_rate
        seconds = seconds + kernel_s * dp.work.blocks.num_tensors[row]
        return np.where(is_here, seconds, 0.0), (dp.layouts.is_resharded & (position.kind == BLOCK)).astype(np.float64)

    def before_blocks(self, times: BlockTimes, memory_rate: Floats) -> Passes:
        """Return the seconds before the first block, forward and backward: of the embedding, forward with copies of the
        ends; in backward FSDP2 waits for the first block's reduction before it copies theirs.
        """
        forward, backward = np.zeros(len(self.parallel.layouts)), np.zeros(len(self.parallel.layouts))
        for position in self.positions:
            if position.kind != BLOCK:
                copies = fsdp_copies_s(self.parallel, position.row, memory_rate, is_block=False)
                has_embedding = position.kind == FIRST
                forward += position.count * (copies[0] + has_embedding * times.memory[0][position.row])
                backward += position.count * has_embedding * times.memory[1][position.row]
        return forward, backward

    def before_gather_s(self, position: BlockPosition, memory_rate: Floats, slow: StackFactors) -> Floats:
        """Return the seconds in which a position's shards are made ready to be gathered, on the gathers' stream: of
        blocks those that are rounded, of the ends all. 0 on a rank alone.
        """
        dp, row = self.parallel, position.row
        moved = _rounded_bytes(dp, row)
        if position.kind != BLOCK:
            cast = _MASTER_BYTES * (dp.element_bytes < _MASTER_BYTES) + 3 * dp.element_bytes
            moved = moved + dense_parameters(dp, row) / np.maximum(dp.layouts.fsdp, 1) * cast
        is_shared = dp.is_own & dp.shards_parameters & (dp.layouts.fsdp > 1) & ~dp.layouts.compiles_model
        return np.where(is_shared, moved / memory_rate * slow.compute * slow.overhead, 0.0)

    def after_reduction_s(
        self, position: BlockPosition, memory_rate: Floats, slow: StackFactors, kernel_s: float
    ) -> Floats:
        """Return the seconds in which a block's reduced gradients are added up next to what computes, in the mean over
        microbatches.
        """
        seconds = added_s(self.parallel, position.row, memory_rate, kernel_s) * slow.compute * slow.overhead
        return np.where(self.parallel.layouts.compiles_model, 0.0, seconds)


def fsdp_copies_s(dp: DataParallel, row: Ints, memory_rate: Floats, *, is_block: bool) -> Passes:
    """Return the seconds of what FSDP itself computes for one row and one microbatch, forward and backward: casts,
    copies, sums.

    Blocks may be gathered again in backward, what stands before and after them is not.
    """
    blocks, layouts = dp.work.blocks, dp.layouts
    parameters = dense_parameters(dp, row) + blocks.expert_parameters[row]
    trained = trained_dense_parameters(dp, row) + blocks.trained_expert_parameters[row]
    reordered = reordered_experts(dp, row)
    reordered_back = np.where(blocks.trained_expert_parameters[row] > 0, reordered, 0.0)
    last = 1.0 / dp.num_microbatches
    # Out of the buffer that was gathered; blocks that are freed are gathered again.
    gathered = dp.gather_bytes * (parameters + reordered) - saved_gather_bytes(dp, row)
    out = 2 * np.where(layouts.is_resharded, 1.0, last) * gathered
    kept = np.where(layouts.kept_on > 0, 2 * dp.gather_bytes * parameters / np.maximum(layouts.kept_on, 1), 0.0)
    num_reductions = np.where(layouts.reduces_each_microbatch, 1.0, last)
    reduced = trained * _bytes_to_reduce(dp) + 2 * reordered_back * num_reductions * dp.element_bytes
    is_shared = layouts.fsdp > 1
    forward = np.where(is_shared, out + (kept if is_block else 0.0), 0.0)
    backward = np.where(is_shared, (out if is_block else 0.0) + reduced, _whole_bytes(dp, row, parameters, trained))
    forward = forward + np.where(is_shared, 0.0, last * _rounded_bytes(dp, row))
    backward = backward + trained * dp.rounded_bytes
    backward = backward + trained * (blocks.kind[row] == FIRST) * _bytes_of_embedding(dp)
    forward, backward = (np.where(dp.shards_parameters, moved, 0.0) for moved in (forward, backward))
    return forward / memory_rate, backward / memory_rate


def _rounded_bytes(dp: DataParallel, row: Ints) -> Floats:
    """Return the bytes that rounding one row's shards to 8 bits moves, once."""
    shard = dp.work.blocks.low_parameters[row] / np.maximum(dp.layouts.fsdp, 1)
    return np.asarray(shard * ROUNDED_FLOAT32_BYTES)


def added_s(dp: DataParallel, row: Ints, memory_rate: Floats, kernel_s: float) -> Floats:
    """Return the seconds in which one row's reduced gradients are added to those of the microbatches before, on the
    stream of reductions, by a kernel for each tensor, in the mean over microbatches.
    """
    moved = 3 * dp.reduce_bytes * dp.trained_shard(row)
    seconds = moved / memory_rate + kernel_s * dp.work.blocks.num_trained_tensors[row]
    return np.where(_adds_reduced(dp), (1 - 1 / dp.num_microbatches) * seconds, 0.0)


def _adds_reduced(dp: DataParallel) -> Bools:
    """Return where the device adds up what is reduced in each microbatch (ours)."""
    layouts = dp.layouts
    is_reduced = (layouts.fsdp > 1) & layouts.reduces_each_microbatch & ~sums_on_host(layouts)
    return np.asarray(dp.is_own & dp.shards_parameters & (dp.num_microbatches > 1) & is_reduced)


def fsdp_kernels(dp: DataParallel, row: Ints) -> Floats:
    """Return the kernels that add up one row's whole gradients after each microbatch: ours, one for each tensor. Graphs
    also cast each tensor and its gradient, and add in a step's only microbatch, too.
    """
    is_graph = dp.layouts.cuda_graphs & ~dp.layouts.compiles_model
    adds = dp.is_own & dp.shards_parameters & ((dp.num_microbatches > 1) | is_graph) & ~_adds_reduced(dp)
    each = np.where(is_graph & (dp.element_bytes < _MASTER_BYTES), 3.0, 1.0)
    return np.where(adds, each * dp.work.blocks.num_trained_tensors[row], 0.0)


def reordered_experts(dp: DataParallel, row: Ints) -> Floats:
    """Return the parameters of experts that ranks cut in another dim than FSDP2's first, since there are fewer of them
    than ranks, or the ranks do not divide them: what is gathered and what is reduced is copied once more into order.
    """
    blocks, expert_dp_shard = dp.work.blocks, np.maximum(dp.layouts.expert_dp_shard, 1)
    is_cut_across = np.mod(blocks.num_local_experts[row], expert_dp_shard) != 0
    return np.where(is_cut_across & dp.is_own, blocks.expert_parameters[row], 0.0)


def _whole_bytes(dp: DataParallel, row: Ints, parameters: Floats, trained: Floats) -> Floats:
    """Return the bytes that are moved for `parameters`, those `trained` among them, that no rank shares with another.

    What is frozen is copied once a step, as narrow as it is kept; in float32 it is cast before, as what is trained is.
    """
    copied = (parameters - trained) * 2 * dp.element_bytes - 2 * dp.work.blocks.narrow_gather_bytes[row]
    frozen = (copied + dp.work.blocks.cast_frozen_parameters[row] * _cast_bytes(dp)) / dp.num_microbatches
    return np.asarray(trained * _bytes_of_whole(dp) + frozen)


def _whole_kernels(dp: DataParallel, row: Ints) -> Floats:
    """Return our kernels that cast and copy one row's parameters, two for each tensor once a step, where no rank shares
    them with another.
    """
    layouts, last = dp.layouts, 1.0 / dp.num_microbatches
    is_whole = (layouts.fsdp == 1) & ~layouts.compiles_model & ~layouts.cuda_graphs & ~dp.sums_in_place
    return np.where(is_whole & dp.is_own & dp.shards_parameters, 2 * last * dp.work.blocks.num_tensors[row], 0.0)


def _bytes_of_whole(dp: DataParallel) -> Floats:
    """Return the bytes that are moved for each parameter and microbatch where no rank shares it with another.

    A model's graph casts parameters in forward and again in backward, and gradients; what is summed over replicas in
    it is copied out of a bucket, and the gradients of several microbatches are added up. FSDP2 still casts parameters
    and copies them, takes each microbatch's gradients into a sum, and copies that three times: into its buffer,
    divided, and out of it. Without it autograd adds up the gradients of several microbatches. Microbatches that are
    graphs have no FSDP2 (parallelism/graph/cuda_graph.py): of_graphs.
    """
    last, element, reduce = 1.0 / dp.num_microbatches, dp.element_bytes, dp.reduce_bytes
    parameters = last * (_MASTER_BYTES + 3 * element)
    out = 4 * reduce
    # The first microbatch's gradients are cast, those of others added.
    summed = element + reduce + (1 - last) * reduce + last * (2 * reduce + out)
    summed = np.where(dp.num_microbatches > 1, summed, element + reduce + out)
    each = element + reduce + out + (1 - last) * 3 * reduce
    of_hooks = parameters + np.where(dp.layouts.reduces_each_microbatch, each, summed)
    is_joined = (dp.layouts.dp_replicate > 1) & (dp.num_microbatches == 1)
    of_graph = 2 * (_MASTER_BYTES + element) + element + reduce + (1 - last) * 3 * reduce + is_joined * 2 * reduce
    of_sums = np.where(dp.sums_in_place, (1 - last) * 3 * reduce, of_hooks)
    # Each graph casts parameters and gradients again, and adds to buffers that are zeroed once a step.
    of_graphs = 2 * _cast_bytes(dp) + 3 * _MASTER_BYTES + last * _MASTER_BYTES
    of_sums = np.where(dp.layouts.cuda_graphs, of_graphs, of_sums)
    return np.asarray(np.where(dp.layouts.compiles_model, of_graph, of_sums))


def _cast_bytes(dp: DataParallel) -> Floats:
    """Return the bytes that a cast between a parameter's own format and that of matmuls moves; 0 where they are one."""
    return np.where(dp.element_bytes < _MASTER_BYTES, _MASTER_BYTES + dp.element_bytes, 0.0)


def tied_bytes(dp: DataParallel, row: Ints) -> Floats:
    """Return the bytes that are moved to add the gradient of a tied head to that of the embedding, before anything else
    reads them. In graphs each of the two casts the parameter and its own gradient, so that the sum is in the
    parameter's format. A model's graph does it in kernels that it has anyway; a pipeline's stages hold copies.
    """
    layouts = dp.layouts
    moved = np.where(layouts.cuda_graphs, 2 * _cast_bytes(dp) + 3 * _MASTER_BYTES, 3 * dp.element_bytes)
    adds = dp.is_own & (layouts.pp == 1) & ~layouts.compiles_model
    return np.where(adds, dp.work.blocks.trained_tied_parameters[row] * moved, 0.0)


def _bytes_of_embedding(dp: DataParallel) -> Floats:
    """Return the bytes that a model's graph moves on top for each parameter of the embedding: Inductor adds up its
    gradient in float32, which it fills with zeros and reads, where torch's operator writes the computed format.
    """
    return np.where(dp.layouts.compiles_model, 2 * (_MASTER_BYTES - dp.element_bytes), 0.0)


def _bytes_to_reduce(dp: DataParallel) -> Floats:
    """Return the bytes that are moved for each parameter to add up a microbatch's gradients, or to copy them into the
    input of a reduction, once a step or in each microbatch.
    """
    last, element, reduce = 1.0 / dp.num_microbatches, dp.element_bytes, dp.reduce_bytes
    # The first microbatch's gradients are cast, those of others added, and the sums are copied.
    summed = np.where(dp.num_microbatches > 1, element + 2 * reduce + last * reduce, element + reduce)
    copied = np.where(dp.layouts.reduces_each_microbatch, element + reduce, summed)
    return np.where(dp.fuses_sum, 0.0, copied)
