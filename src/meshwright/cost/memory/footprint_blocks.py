"""What one block of each group takes on a rank: parameters, what is kept of one microbatch, what comes and goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from itertools import product
from typing import get_args

import numpy as np

from meshwright.cost.compute.float8_matmuls import low_parameters
from meshwright.cost.compute.recompute import drops_attention
from meshwright.cost.layout_table import CONTEXT_METHODS, Bools, Floats, Ints, LayoutTable, take_rows
from meshwright.cost.memory.footprint_constants import CHUNK_LOSS_BYTES, KEPT_LOSS_BYTES, LOSS_BYTES
from meshwright.cost.memory.footprint_stages import StageCuts
from meshwright.cost.memory.footprint_states import Elements, elements_of, frozen_bytes
from meshwright.cost.memory.footprint_tensors import Bytes, Formats, Split, kept_bytes, pending_bytes, transient_bytes
from meshwright.cost.training_setup import Partition, TrainingSetup
from meshwright.spec.job.rules.optimizer_rules import has_int8_states
from meshwright.spec.layout.layout import ActivationCheckpoint
from meshwright.spec.model.model_spec import BlockGroup
from meshwright.spec.model.op import NARROW_WEIGHT_BYTES, GroupedMatmul, Head, Matmul, Norm, Op
from meshwright.spec.step.workload import BYTES_PER_ELEMENT

_WIDE_COPIES_BYTES = 2 * 4.0 + 2.0
"""Of a weight of experts that is rounded one operator at a time, before it has 8 bits: a copy in another order, that in
float32, and what it is scaled to; counted in a trace."""

_ALL_GATHER, _RING = CONTEXT_METHODS.index("all-gather"), CONTEXT_METHODS.index("ring")


@dataclass(frozen=True)
class BlockMemory:
    """One block of a group; arrays have one element a layout, activations are those of one microbatch."""

    count: int
    """Blocks of the group in the whole model."""
    elements: Elements
    matrices: Floats
    """Elements of its matrices on one rank, after data-parallel ranks have divided them."""
    kept_bytes: Floats
    """Kept for backward under each of ACTIVATION_CHECKPOINTS [policies, layouts]."""
    all_kept_bytes: Floats
    """Kept without recomputation: what a block under recomputation has for a while."""
    transient_bytes: Floats
    """Gradients of the op at work."""
    low_copies_bytes: Floats
    """Operands of one grouped matmul in low precision: an expert kernel's weights and rows are rounded before it; or
    a frozen weight of 8 or 4 bits, made wide for its matmul."""
    pending_bytes: Floats
    """Gradients that wait for a backward to the weights, where backward is split."""


@dataclass(frozen=True)
class EndsMemory:
    """What stands before the blocks and after them."""

    first: Elements
    last: Elements
    with_tied_head: Elements
    """The last, and a head that is tied to the embedding of the same rank: one parameter with that, it has gradients as
    early as any head."""
    last_kept_bytes: Floats
    logits_bytes: Floats
    """Of logits and what the loss makes of them, at its peak; in chunks, of one chunk and the head's whole input."""
    one_logits_bytes: Floats
    """Of the logits alone; in chunks, of one chunk's."""
    early_gradients_bytes: Floats
    """Of the head's gradients, where the loss makes them (in chunks); else 0."""
    kept_loss_bytes: Floats
    """Of what the loss keeps of one microbatch from its forward to its backward."""
    late_gradients_bytes: Floats
    """Of what the head's backward to the weights waits for: the gradient of the logits, in chunks the head's own."""
    freed_logits_bytes: Floats
    """Of the logits alone, where they are freed before that peak."""
    tied_shared: Floats
    """Elements of a pipeline's second copy of a tied embedding, after data-parallel ranks have divided it."""

    def embedding(self, is_first: Floats, is_last: Floats) -> Floats:
        """Return the elements of embeddings on a rank, after data-parallel ranks have divided them."""
        return np.asarray(self.first.shared * is_first + self.tied_shared * is_last)


class ModelMemory:
    """What the parts of one setup's model take under each layout of an accelerator."""

    has_float8_matmuls = True
    """Whether a matmul reads operands in float8, in the order that its kernel asks for; else they are emulated."""
    moves_activations = True
    """Whether layout.activation_offload moves activations out of the device's memory."""
    has_norm_kernels = True
    """Whether one kernel of torch computes an RMSNorm."""
    has_wide_flash_attention = False
    """Whether torch has flash attention of more than 16 bits, which takes keys of fewer heads than queries."""

    def __init__(self, setup: TrainingSetup, layouts: LayoutTable) -> None:
        self.setup, self.layouts = setup, layouts
        self.tokens = layouts.microbatch_size * setup.workload.seq_len / layouts.cp
        self.element_bytes = float(setup.workload.activation_element_bytes)
        self.is_wide = self.element_bytes > BYTES_PER_ELEMENT["bfloat16"]
        # A layout may compile an eager stack's blocks.
        self._by_formats = [(formats, chosen) for formats, chosen in self._formats() if chosen.any()]
        first, *groups, last = setup.trained_model.groups
        of_ops = {ops: self._block(group) for ops, group in {group.ops: group for group in groups}.items()}
        self.blocks = [replace(of_ops[group.ops], count=group.count) for group in groups]
        self.ends = self._ends(first.ops, last.ops)
        self.gather_bytes = self._gather_bytes()
        """Of a block's parameter that is gathered, in the mean over blocks."""
        self.cuts = StageCuts(setup, layouts)
        width = next(op.width for op in last.ops if isinstance(op, Norm))
        self.stream_bytes = self.tokens * width * self.element_bytes
        """Of the residual stream of one microbatch, whole."""
        self.shared_stream_bytes = self.stream_bytes * self._shares(is_one_graph=False)["stream"]

    def take(self, rows: Ints) -> ModelMemory:
        """Return what the parts take under the layouts at `rows`."""
        taken = copy(self)
        taken.layouts, taken.cuts = self.layouts.take(rows), self.cuts.take(rows)
        taken.blocks, taken.ends = [take_rows(block, rows) for block in self.blocks], take_rows(self.ends, rows)
        for name in ("tokens", "stream_bytes", "shared_stream_bytes", "gather_bytes"):
            setattr(taken, name, getattr(self, name)[rows])
        return taken

    @property
    def ranks_to_weigh(self) -> Ints:
        """Return the pipeline ranks that may be the fullest, (most of a layout, layouts)."""
        if self.layouts.checkpoint_of_block is not None:
            # Equally many blocks may save more or less.
            each = np.arange(int(self.layouts.pp.max()))[:, None]
            return np.minimum(each, self.layouts.pp - 1)
        ends = np.cumsum([block.count for block in self.blocks])
        return self.cuts.ranks_to_weigh(self.layouts, tuple(ends.tolist()))

    def _formats(self) -> Iterator[tuple[Formats, Bools]]:
        """Yield the formats of kernels that layouts make, with the layouts that do."""
        setup, name, compiled = self.setup, self.setup.stack.kernels, self.layouts.compiles_blocks
        by_kernels = {"eager": ~compiled, "compiled": compiled} if name == "eager" else {name: compiled | True}
        # Measured on one GPU; sharded over tp, a compiled block was traced to keep what bfloat16 keeps.
        is_low = setup.workload.matmul_dtype in ("float8", "float4") and name != "fused"
        casts_again = is_low & (compiled | (name == "compiled")) & (self.layouts.tp == 1)
        for (kernels, chosen), casts in product(by_kernels.items(), {False, is_low}):
            formats = Formats.of(
                setup.workload,
                setup.stack,
                kernels,
                drops_attention=drops_attention(setup),
                repeats_keys=setup.is_own and self.is_wide and not self.has_wide_flash_attention,
            )
            in_parts = setup.is_own and not self.has_norm_kernels and kernels == "eager"
            yield formats._replace(casts_again=casts, divides_in_float32=in_parts), chosen & (casts_again == casts)

    def _block(self, group: BlockGroup) -> BlockMemory:
        # Mixtures are compiled in parts.
        is_one_graph = not any(isinstance(op, GroupedMatmul) for op in group.ops)

        def kept(policy: ActivationCheckpoint) -> Floats:
            return self._bytes(lambda formats: kept_bytes(group.ops, formats, policy), is_one_graph=is_one_graph)

        by_policy = np.stack([kept(policy) for policy in get_args(ActivationCheckpoint)])
        all_kept = by_policy[0].copy()
        by_policy[0] += self._transposed_weights(group.ops) * is_one_graph
        is_int8 = self.setup.workload.optimizer_state_dtype == "int8"
        matrices = tuple(
            op
            for op in group.ops
            if isinstance(op, Matmul | GroupedMatmul) and not op.is_frozen and (not is_int8 or has_int8_states(op))
        )
        return BlockMemory(
            count=group.count,
            matrices=elements_of(matrices, self.layouts, self.setup.stack).shared,
            elements=elements_of(
                group.ops,
                self.layouts,
                self.setup.stack,
                frozen_bytes=frozen_bytes(self.setup.workload, self.setup.stack),
            ),
            kept_bytes=by_policy,
            all_kept_bytes=all_kept,
            transient_bytes=self._bytes(lambda formats: transient_bytes(group.ops, formats)),
            pending_bytes=self._bytes(lambda formats: pending_bytes(group.ops, formats)),
            low_copies_bytes=self._low_copies(group.ops),
        )

    def _transposed_weights(self, ops: tuple[Op, ...]) -> Floats:
        """Return the bytes of float8 weights that a compiled block keeps transposed for the gradients of inputs.

        Inductor transposes in forward, for each microbatch, the weights that arrive in float8: of the dense network.
        Traced on blocks of 1B and 8B, alone and over tp. Ignored: some of attention, a fortieth without tp.
        """
        if not self.has_float8_matmuls:
            return np.zeros(len(self.layouts))
        partition = Partition(self.setup, self.layouts)
        is_compiled = self.layouts.compiles_blocks | (self.setup.stack.kernels == "compiled")
        return np.asarray(is_compiled * sum(low_parameters(op, partition) for op in ops if op.part == "ffn"))

    def _low_copies(self, ops: tuple[Op, ...]) -> Floats:
        most = np.zeros(len(self.layouts))
        for op in ops:
            if op.weights in NARROW_WEIGHT_BYTES:
                whole = elements_of((op,), self.layouts, self.setup.stack).whole
                most = np.maximum(most, self.element_bytes * whole)
        is_eager = ~self.layouts.compiles_blocks | (self.layouts.ep > 1) | (self.layouts.tp > 1)
        of_weight = np.where(is_eager, _WIDE_COPIES_BYTES, 1.0)
        for op in ops if self.setup.own_float8_experts else ():
            if isinstance(op, GroupedMatmul):
                weights, rows = elements_of((op,), self.layouts, self.setup.stack).whole, op.experts_per_token
                width = max(op.in_features, op.out_features) / self.layouts.etp
                most = np.maximum(most, of_weight * weights + self.tokens * rows * width)
        return most

    def _gather_bytes(self) -> Floats:
        setup, partition = self.setup, Partition(self.setup, self.layouts)
        wide = 1.0 if setup.gathers_low else self.element_bytes
        groups = setup.trained_model.groups[1:-1]
        low = sum(group.count * low_parameters(op, partition) for group in groups for op in group.ops)
        whole = sum(block.elements.whole * block.count for block in self.blocks)
        narrow, narrow_bytes = (
            sum(getattr(block.elements, name) * block.count for block in self.blocks)
            for name in ("narrow_whole", "narrow_whole_bytes")
        )
        saved = 0.0 if setup.gathers_low else wide * narrow - narrow_bytes
        return np.asarray(wide - ((wide - 1.0) * low + saved) / np.maximum(whole, 1))

    def _ends(self, first: tuple[Op, ...], last: tuple[Op, ...]) -> EndsMemory:
        layouts, stack = self.layouts, self.setup.stack
        head = next(op for op in last if isinstance(op, Head))
        own, with_copy = (elements_of(last, layouts, stack, has_copy=copy) for copy in (False, True))
        is_piped = layouts.pp > 1
        is_chunked = layouts.loss_chunks > 1
        own_vocabulary = head.vocab_size / layouts.tp
        logits = self.tokens * own_vocabulary
        has_gradients = not head.is_frozen
        early_gradients = has_gradients * is_chunked * own_vocabulary * head.dim * self.element_bytes
        makes_gap = stack.has_plain_loss and not self.is_wide
        return EndsMemory(
            first=elements_of(first, layouts, stack),
            last=with_copy.where(is_piped, own),
            with_tied_head=with_copy,
            last_kept_bytes=self._bytes(lambda formats: kept_bytes(last, formats, "none"), is_one_graph=False),
            logits_bytes=np.where(is_chunked, self._of_chunk(head), logits * self._of_loss(LOSS_BYTES)),
            one_logits_bytes=logits * self.element_bytes / layouts.loss_chunks,
            early_gradients_bytes=early_gradients,
            kept_loss_bytes=np.where(is_chunked, early_gradients, logits * self._of_loss(KEPT_LOSS_BYTES)),
            late_gradients_bytes=np.where(is_chunked, early_gradients, logits * self.element_bytes),
            # What a loss over tp makes first, while the logits are still there, has room for all that comes later.
            # In 32 bits the next tensor of the loss fits where they were.
            freed_logits_bytes=logits * self.element_bytes * (layouts.tp == 1) * makes_gap * ~is_chunked,
            tied_shared=np.where(is_piped, with_copy.shared - own.shared, 0.0),
        )

    def _of_chunk(self, head: Head) -> Floats:
        """Return the bytes that a loss in chunks has besides gradients: what is kept instead are those of its input."""
        logits = np.ceil(self.tokens / self.layouts.loss_chunks) * head.vocab_size / self.layouts.tp
        # Compiled, a chunk's gradient is computed at once, next to its logits, and copied to their place.
        of_logit = 2 * self.element_bytes if self.setup.stack.joins_loss else CHUNK_LOSS_BYTES[self.is_wide]
        return np.asarray(logits * of_logit + self.tokens * head.dim * self.element_bytes)

    def _of_loss(self, bytes_by_kind: Mapping[str, tuple[float, float]]) -> Floats:
        """Return the bytes of a logit by how the loss is computed, which compiled blocks leave as it is."""
        stack, tp = self.setup.stack, self.layouts.tp
        of_kind = {kind: of_format[self.is_wide] for kind, of_format in bytes_by_kind.items()}
        if stack.joins_loss:
            return of_kind["joined"] + np.zeros(len(tp))
        if not stack.has_plain_loss:
            return of_kind["fused" if stack.kernels == "fused" else "eager"] + np.zeros(len(tp))
        return np.where(tp > 1, of_kind["freed over tp"], of_kind["freed"])

    def _bytes(self, parts_of: Callable[[Formats], Bytes], *, is_one_graph: bool = True) -> Floats:
        """Return this rank's bytes of one microbatch; `is_one_graph` where a compiler takes all these ops at once."""
        total = np.zeros(len(self.layouts))
        for formats, chosen in self._by_formats:
            shares = self._shares(is_one_graph=is_one_graph and formats.kernels == "compiled")
            parts = parts_of(formats)
            whole = sum((size * shares[split] for split, size in parts.items()), start=np.zeros(len(self.layouts)))
            total = np.where(chosen, whole, total)
        return total * self.tokens

    def _shares(self, *, is_one_graph: bool) -> dict[Split, Floats]:
        """Return the share of a tensor that a rank holds, by how tp ranks divide it."""
        tp, cp, stack, method = self.layouts.tp, self.layouts.cp, self.setup.stack, self.layouts.cp_method
        whole, part = np.ones(len(self.layouts)), 1 / tp
        stream = part if stack.sequence_parallel else whole
        keeps_shards = stack.gathers_again or stack.gathers_input_again
        # Those who do so for keys, too, know the mask.
        gathers_keys = (method == _ALL_GATHER) & (cp > 1) & (not stack.gathers_again)
        # In one graph with its readers, the compiler recomputes what is gathered again, and what is joined with a
        # reduce-scatter. Eager attention cuts the graph.
        recomputes = is_one_graph & stack.gathers_input_again & (tp > 1) & ~self.layouts.has_eager_attention
        return {
            "stream": stream,
            "gathered": np.where(recomputes, 0.0, stream if keeps_shards else whole),
            "latent": stream if stack.gathers_again else whole,
            "heads": part,
            # Several sequences are put in another order for the reduce-scatter, and that copy is kept.
            "product": np.where(recomputes & self.layouts.async_tp & (self.layouts.microbatch_size == 1), 0.0, part),
            "rows": np.where(self.layouts.etp == 1, part, whole),
            "other_keys": np.where(gathers_keys, (cp - 1) * part, 0.0),
            "mask": self._mask_share(gathers_keys),
        }

    def _mask_share(self, gathers_keys: Bools) -> Floats:
        """Return what a rank keeps of a mask for each of its queries, over that of half of a sequence's keys."""
        layouts = self.layouts
        if not self.setup.masks_scores:
            # One for all sequences.
            return np.where(gathers_keys, 1 / layouts.microbatch_size, 0.0)
        # A ring keeps none. Else, where keys are not gathered, each rank has the mask of the whole sequence.
        is_ring = (layouts.cp_method == _RING) & (layouts.cp > 1)
        return np.where(gathers_keys, 1.0, np.where(is_ring, 0.0, 2.0 * layouts.cp))


class HostModelMemory(ModelMemory):
    """The same where kernels run on the host."""

    moves_activations = False
    has_float8_matmuls = False
    has_norm_kernels = False
    has_wide_flash_attention = True
