"""Work: what one rank does for one microbatch in each block, as flat tables of ops with their shapes and no price.

The op list of a block (ModelSpec) is divided by the layout's degrees:

    tokens        microbatch x seq_len / cp, between matmuls / tp (sequence parallel)
    attention     heads / tp, each token with the mean of what it attends to

Matmuls are in matmul_lines. Ignored: biases, dropout, and the unevenness of tp degrees that do not divide a width.
Router skew is a factor on the step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.compute.float8_matmuls import low_parameters, num_low_experts, num_low_matmuls
from meshwright.cost.compute.matmul_lines import (
    Matmuls,
    early_terms_share,
    last_matmul_share,
    matmul_lines,
    second_matmuls_share,
)
from meshwright.cost.compute.own_elements import eager_elements, network_share, own_elements
from meshwright.cost.compute.recomputed_elements import recomputed_elements
from meshwright.cost.layout_table import Floats, Ints, LayoutTable
from meshwright.cost.training_setup import Configurations, Partition, TrainingSetup
from meshwright.spec.model.model_spec import BlockGroup
from meshwright.spec.model.op import (
    NARROW_WEIGHT_BYTES,
    CoreAttention,
    Elementwise,
    Embedding,
    GroupedMatmul,
    Head,
    Matmul,
    Norm,
    Op,
    Rope,
    computed_context,
)
from meshwright.spec.step.gradient_sums import sizes_summed_alone

BLOCK, FIRST, LAST = 0, 1, 2
"""Kinds of blocks: one block of a group, what stands before the blocks, what stands after them."""

KEY_FIELDS = ("tp", "cp", "ep", "etp", "microbatch_size", "loss_chunks", "has_eager_attention")
"""All of a layout that the work of one microbatch in one block depends on."""


@dataclass(frozen=True)
class BlockTable:
    """One row for each key and each block group: what one of its blocks does besides matmuls."""

    key: Ints
    kind: Ints
    count: Floats
    """Blocks of this kind."""
    tokens: Floats
    """Tokens of one microbatch on one rank, before tp divides them."""
    width: Floats
    """Elements of a token between blocks."""
    attention_flops: Floats
    """Model FLOPs of attention's forward pass."""
    context: Floats
    """Tokens that each token attends to in the mean."""
    computed_context: Floats
    """The same of kernels that skip what documents and windows hide (spec/model/op.py)."""
    head_width: Floats
    score_elements: Floats
    """Elements of the whole matrix of scores, masked ones included."""
    kv_elements: Floats
    """Elements of the keys and values of this rank's part of the sequence."""
    swapped_kv_elements: Floats
    """The same with heads repeated until cp ranks get equally many, as ulysses needs them."""
    memory_elements: Floats
    """Elements that memory-bound ops of the forward pass read and write."""
    own_forward_elements: Floats
    """The same of our own trainer, whose memory_elements are 0: counted kernel by kernel (own_elements.py)."""
    own_backward_elements: Floats
    network_share: Floats
    """Of own_backward_elements those in graphs where only networks are compiled; else 1."""
    recomputed_elements: Floats
    """What a compiled block reads and writes more that recomputes all of forward; NaN where no graph has both."""
    eager_forward_elements: Floats
    """What a mixture of experts that runs operator by operator reads and writes, which is in none of these."""
    eager_backward_elements: Floats
    biased_elements: Floats
    """Elements that experts' biases, clamps and scales read and write, an operator each."""
    loss_elements: Floats
    """Logits."""
    last_matmul_share: Floats
    """Share of the block's matmul FLOPs in its last one, whose output backward does not need, or 0 if it does."""
    second_matmuls_share: Floats
    """Share in every second one."""
    early_terms_share: Floats
    """Share in row-parallel ones but the last where tp divides them, else 0."""
    num_ops: Floats
    """Without those of adapters."""
    num_adapters: Floats
    """Adapters whose output is added to a matmul's, those of fused matmuls as one."""
    num_row_norms: Floats
    """Linear layers whose rows have norms that are trained."""
    num_tensors: Floats
    """Parameters as tensors: weights and biases."""
    num_trained_tensors: Floats
    """Those of them that have gradients."""
    num_large_tensors: Floats
    """Those of them whose gradients in float32 replicas sum one by one (spec/step/gradient_sums.py)."""
    large_parameters: Floats
    """Elements of these."""
    num_biases: Floats
    """Of matmuls."""
    has_rope: Floats
    num_tp_collectives: Floats
    """All-gathers and reduce-scatters of the residual stream in the forward pass; as many undo them in backward."""
    num_tp_inputs: Floats
    """Those of the all-gathers whose result column-parallel matmuls need again for the gradients of their weights."""
    routed_copies: Floats
    """Experts that each token goes to; 0 in a dense block."""
    dense_parameters: Floats
    """Parameters that data-parallel ranks share, on this rank before they are sharded."""
    trained_dense_parameters: Floats
    """Those of them that have gradients."""
    tied_parameters: Floats
    """Parameters of a tied head on this rank, which are the embedding's; a pipeline's last stage has a copy of them."""
    trained_tied_parameters: Floats
    low_parameters: Floats
    """Those of dense_parameters that our trainer gathers in 8 bits."""
    num_low_matmuls: Floats
    """Linear layers that it computes in 8 bits."""
    num_low_around_attention: Floats
    """Those of them around attention."""
    num_low_experts: Floats
    """Grouped matmuls of experts that it does."""
    replicated_parameters: Floats
    """Trained ones of them that tp does not divide."""
    expert_parameters: Floats
    """The same of experts."""
    trained_expert_parameters: Floats
    cast_frozen_parameters: Floats
    """Frozen ones on this rank that are kept as the optimizer keeps the others, and cast as these are."""
    narrow_gather_bytes: Floats
    """Bytes that gathering is less because frozen weights have 8 or 4 bits."""
    num_local_experts: Floats
    """Experts of one rank, before data-parallel ranks share them."""


@dataclass(frozen=True)
class Work:
    """The keys of all configs, and what each asks for."""

    key_of_config: Ints
    """Position of each configuration's key."""
    setup_index: Ints
    """Position of each key's setup."""
    keys: LayoutTable
    """One layout for each key; only KEY_FIELDS of it mean something."""
    blocks: BlockTable
    matmuls: Matmuls


def work_of(configs: Configurations) -> Work:
    """Return what the configurations' ranks do, each distinct (setup, KEY_FIELDS) once."""
    _, first, inverse = np.unique(_key_numbers(configs), return_index=True, return_inverse=True)
    setup_index, keys = configs.setup_index[first], configs.layouts.take(first)
    blocks: list[dict[str, NDArray[Any]]] = []
    lines: list[dict[str, NDArray[Any]]] = []
    num_rows = 0
    for position in np.unique(setup_index):
        rows = np.flatnonzero(setup_index == position)
        for group, kind in groups_of(configs.setups[position]):
            index = num_rows + np.arange(len(rows))
            partition = Partition(configs.setups[position], keys.take(rows))
            blocks.append({"key": rows, **_block_row(group, kind, partition)})
            lines += [{"block": index, **line} for line in matmul_lines(group, partition)]
            num_rows += len(rows)
    return Work(
        inverse.ravel(),
        setup_index,
        keys,
        BlockTable(**_joined(BlockTable, blocks)),
        Matmuls(**_joined(Matmuls, lines)),
    )


def _key_numbers(configs: Configurations) -> Ints:
    """Return one number for each, equal for equal keys and in their order: sorting rows of a table is slow."""
    numbers = configs.setup_index
    for name in KEY_FIELDS:
        values = getattr(configs.layouts, name)
        numbers = numbers * (values.max(initial=0) + 1) + values
    return np.asarray(numbers, np.int64)


def groups_of(setup: TrainingSetup) -> Iterator[tuple[BlockGroup, int]]:
    """Yield the model's groups and their kinds, groups of equal ops as one; those before the blocks are FIRST."""
    for group in setup.trained_model.distinct_groups:
        if any(isinstance(op, Head) for op in group.ops):
            yield group, LAST
        elif any(isinstance(op, Embedding) for op in group.ops):
            yield group, FIRST
        else:
            yield group, BLOCK


def _block_row(group: BlockGroup, kind: int, partition: Partition) -> dict[str, NDArray[Any]]:
    cores = [op for op in group.ops if isinstance(op, CoreAttention)]
    routed = [op.experts_per_token for op in group.ops if isinstance(op, GroupedMatmul)]
    num_experts = max((op.num_experts for op in group.ops if isinstance(op, GroupedMatmul)), default=0)
    core = cores[0] if cores else None
    tokens, zero = partition.tokens, np.zeros_like(partition.tokens)
    heads = 0.0 if core is None else core.num_heads / partition.tp
    kv_heads = zero if core is None else np.maximum(core.num_kv_heads / partition.tp, 1)
    head_width = 0.0 if core is None else (core.head_dim + core.value_head_dim) / 2
    context = 1.0 if core is None else core.mean_context(partition.seq_len)
    computed = 1.0 if core is None else computed_context(partition.seq_len, core.window, partition.document_tokens)
    eager_forward, eager_backward = eager_elements(group.ops, partition)
    own_forward, own_backward = own_elements(group.ops, partition)
    biases = [op for op in group.ops if isinstance(op, Elementwise) and op.role == "bias"]
    plain = [op for op in group.ops if op not in biases]
    large = [size for op in group.ops if not op.is_frozen for size in sizes_summed_alone(op)]
    experts = [op for op in group.ops if isinstance(op, GroupedMatmul)]
    tied = [op for op in group.ops if isinstance(op, Head) and op.tied]
    values = {
        "kind": zero + kind,
        "count": zero + group.count,
        "tokens": tokens,
        "width": zero + _width(group),
        "attention_flops": 4 * tokens * heads * head_width * context,
        "context": zero + context,
        "computed_context": zero + computed,
        "head_width": zero + head_width,
        "score_elements": tokens * heads * partition.seq_len,
        "kv_elements": 2 * tokens * kv_heads * head_width,
        "swapped_kv_elements": 2 * tokens * np.lcm(kv_heads.astype(np.int64), partition.cp) * head_width,
        "memory_elements": zero + sum(moved_elements(op, partition) for op in plain) * (not partition.is_own),
        "own_forward_elements": own_forward,
        "own_backward_elements": own_backward,
        "network_share": network_share(group.ops, partition),
        "recomputed_elements": zero + recomputed_elements(group.ops, partition),
        "eager_forward_elements": eager_forward,
        "eager_backward_elements": eager_backward,
        "biased_elements": zero + sum(moved_elements(op, partition) for op in biases),
        "loss_elements": zero + sum(tokens * op.vocab_size / partition.tp for op in group.ops if isinstance(op, Head)),
        "last_matmul_share": zero + last_matmul_share(group, partition),
        "second_matmuls_share": zero + second_matmuls_share(group),
        "early_terms_share": np.where(partition.tp > 1, early_terms_share(group), 0.0),
        "num_ops": zero + sum(not is_of_adapter(op) for op in group.ops),
        "num_adapters": zero + _num_adapters(group.ops, partition),
        "num_row_norms": zero + sum(getattr(op, "trains_row_norms", False) for op in group.ops),
        "num_tensors": zero + sum(num_tensors_of(op) for op in group.ops),
        "num_trained_tensors": zero + sum(num_trained_tensors_of(op) for op in group.ops),
        "num_large_tensors": zero + len(large),
        "large_parameters": zero + sum(large),
        "num_biases": zero + sum(isinstance(op, Matmul) and op.has_bias for op in group.ops),
        "has_rope": zero + any(isinstance(op, Rope) for op in group.ops),
        "num_tp_collectives": zero + _num_tp_collectives(group, partition),
        "num_tp_inputs": np.where(partition.tp > 1, _num_row_matmuls(group), 0.0),
        "routed_copies": zero + (max(routed) if routed else 0),
        "num_local_experts": num_experts / partition.ep,
        "dense_parameters": zero + sum(_dense_parameters(op, partition) for op in group.ops),
        "trained_dense_parameters": zero + sum(_trained_dense_parameters(op, partition) for op in group.ops),
        "tied_parameters": zero + sum(op.num_matmul_parameters for op in tied) / partition.tp,
        "trained_tied_parameters": zero
        + sum(op.num_matmul_parameters for op in tied if not op.is_frozen) / partition.tp,
        "low_parameters": zero + sum(low_parameters(op, partition) for op in group.ops),
        "num_low_matmuls": zero + num_low_matmuls(group.ops, partition),
        "num_low_around_attention": zero
        + num_low_matmuls([op for op in group.ops if op.part == "attention"], partition),
        "num_low_experts": zero + num_low_experts(group.ops, partition),
        "replicated_parameters": zero
        + sum(_trained_dense_parameters(op, partition) for op in group.ops if not _is_split(op)),
        "expert_parameters": (zero + sum(op.num_parameters for op in experts)) / (partition.ep * partition.etp),
        "trained_expert_parameters": (zero + sum(op.num_trained_parameters for op in experts))
        / (partition.ep * partition.etp),
        "cast_frozen_parameters": zero + sum(_cast_frozen_parameters(op, partition) for op in group.ops),
        "narrow_gather_bytes": zero + sum(_narrow_gather_bytes(op, partition) for op in group.ops),
    }
    return values


def _width(group: BlockGroup) -> float:
    norms = [op.width for op in group.ops if isinstance(op, Norm)]
    return float(norms[0] if norms else next(op.dim for op in group.ops if isinstance(op, Embedding)))


def _dense_parameters(op: Op, partition: Partition) -> Floats:
    if isinstance(op, GroupedMatmul):
        return np.zeros_like(partition.tokens)
    return op.num_parameters / (partition.tp if _is_split(op) else np.ones_like(partition.tokens))


def _trained_dense_parameters(op: Op, partition: Partition) -> Floats:
    """Return those of them that have gradients."""
    if isinstance(op, GroupedMatmul):
        return np.zeros_like(partition.tokens)
    return op.num_trained_parameters / (partition.tp if _is_split(op) else np.ones_like(partition.tokens))


def _cast_frozen_parameters(op: Op, partition: Partition) -> Floats:
    """Return the frozen weights of `op` that are kept in the usual format."""
    if op.weights != "frozen":
        return np.zeros_like(partition.tokens)
    whole = op.num_parameters - op.num_trained_parameters
    experts = partition.ep * partition.etp * np.ones_like(partition.tokens)
    return whole / (experts if isinstance(op, GroupedMatmul) else partition.tp ** float(_is_split(op)))


def _narrow_gather_bytes(op: Op, partition: Partition) -> Floats:
    """Return the bytes that gathering a frozen weight of 8 or 4 bits is less than gathering it in the usual format."""
    if not (isinstance(op, Matmul | GroupedMatmul) and op.weights in NARROW_WEIGHT_BYTES):
        return np.zeros_like(partition.tokens)
    usual = 1.0 if partition.gathers_low else partition.element_bytes
    experts = partition.ep * partition.etp * np.ones_like(partition.tokens)
    split = experts if isinstance(op, GroupedMatmul) else partition.tp ** float(_is_split(op))
    return np.asarray(max(usual - NARROW_WEIGHT_BYTES[op.weights], 0.0) * op.num_parameters / split)


def num_tensors_of(op: Op) -> int:
    """Return the parameters of `op` as tensors; a tied head counts, since a pipeline's last stage has a copy."""
    return (op.num_parameters > 0 or isinstance(op, Head)) * (1 + getattr(op, "has_bias", False))


def num_trained_tensors_of(op: Op) -> int:
    """Return those of them that have gradients."""
    return int(getattr(op, "trains_row_norms", False)) if op.is_frozen else num_tensors_of(op)


def _is_split(op: Op) -> bool:
    """Return whether tp ranks divide the parameters of `op`."""
    return isinstance(op, Embedding | Head | CoreAttention) or (isinstance(op, Matmul) and op.tensor_split != "none")


def is_of_adapter(op: Op) -> bool:
    """Return whether `op` is a matrix of an adapter, or the sum that adds its output."""
    return getattr(op, "adapter_matrix", "none") != "none" or getattr(op, "role", "") in ("adapter_sum", "adapter_gain")


def _num_adapters(ops: Sequence[Op], partition: Partition) -> int:
    """Return the sums of adapters' outputs; those next to each other are one where their layers are fused."""
    are_sums = [getattr(op, "role", "") == "adapter_sum" for op in ops]
    if not partition.fuses:
        return sum(are_sums)
    return sum(here and not before for before, here in pairwise((False, *are_sums)))


def _num_row_matmuls(group: BlockGroup) -> float:
    """Return how many pairs of column- and row-parallel matmuls the group's blocks have."""
    rows = [op for op in group.ops if isinstance(op, Matmul) and op.tensor_split == "rows"]
    return float(sum(op.adapter_matrix == "none" for op in rows))


def _num_tp_collectives(group: BlockGroup, partition: Partition) -> Floats:
    """Return 2 for each pair of column and row matmuls, where tp > 1: attention, a dense ffn, shared experts.

    An embedding scatters what it has looked up, the head gathers what it reads.
    """
    num_pairs = _num_row_matmuls(group)
    num_pairs += 0.5 * any(isinstance(op, Embedding | Head) for op in group.ops)
    copies = max((op.experts_per_token for op in group.ops if isinstance(op, GroupedMatmul)), default=0)
    # Split experts gather and scatter each token's copies, or, next to shared ones, the tokens before they are routed.
    is_shared = any(op.part == "shared_experts" for op in group.ops)
    more = copies if partition.gathers_routed_tokens else float(copies > 0 and not is_shared)
    return np.where(partition.tp > 1, 2 * num_pairs + np.where(partition.etp > 1, 2.0 * more, 0.0), 0.0)


def moved_elements(op: Op, partition: Partition) -> Floats:
    """Return the elements that a memory-bound op reads and writes in the forward pass; 0 of the others."""
    tokens, between, tp = partition.tokens, partition.tokens_between, partition.tp
    if isinstance(op, Norm):
        return 2.0 * op.width * op.vectors_per_token * (between if op.input == "stream" else tokens / tp)
    if isinstance(op, Rope):
        return 2.0 * op.num_heads * op.head_dim * tokens / tp
    if isinstance(op, Embedding):
        return 2.0 * op.dim * between
    if isinstance(op, Elementwise):
        elements = float(op.reads_per_token + op.writes_per_token)
        if op.role in ("residual", "combine"):
            return elements * between
        is_whole_width = op.role in ("permute", "unpermute")
        return elements * tokens / tp * (partition.etp if is_whole_width else 1.0)
    return np.zeros_like(tokens)


def _joined(table: type, parts: list[dict[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    """Return the columns of all `parts` one after the other."""
    lengths = [len(next(iter(part.values()))) for part in parts]
    columns = {}
    for name in (field.name for field in fields(table)):
        columns[name] = np.concatenate(
            [_of_length(part[name], length) for part, length in zip(parts, lengths, strict=True)]
        )
    return columns


def _of_length(column: NDArray[Any], length: int) -> NDArray[Any]:
    return column if column.shape == (length,) else np.broadcast_to(column, (length,))
