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

from meshwright.cost.blocks.block_table import BLOCK, FIRST, LAST, BlockTable
from meshwright.cost.blocks.rank_parameters import (
    cast_frozen_parameters_of,
    dense_parameters_of,
    is_split,
    narrow_gather_bytes_of,
    num_tensors_of,
    num_trained_tensors_of,
    trained_dense_parameters_of,
)
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

KEY_FIELDS = ("tp", "cp", "ep", "etp", "microbatch_size", "loss_chunks", "has_eager_attention")
"""All of a layout that the work of one microbatch in one block depends on."""


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
        "dense_parameters": zero + sum(dense_parameters_of(op, partition) for op in group.ops),
        "trained_dense_parameters": zero + sum(trained_dense_parameters_of(op, partition) for op in group.ops),
        "tied_parameters": zero + sum(op.num_matmul_parameters for op in tied) / partition.tp,
        "trained_tied_parameters": zero
        + sum(op.num_matmul_parameters for op in tied if not op.is_frozen) / partition.tp,
        "low_parameters": zero + sum(low_parameters(op, partition) for op in group.ops),
        "num_low_matmuls": zero + num_low_matmuls(group.ops, partition),
        "num_low_around_attention": zero
        + num_low_matmuls([op for op in group.ops if op.part == "attention"], partition),
        "num_low_experts": zero + num_low_experts(group.ops, partition),
        "replicated_parameters": zero
        + sum(trained_dense_parameters_of(op, partition) for op in group.ops if not is_split(op)),
        "expert_parameters": (zero + sum(op.num_parameters for op in experts)) / (partition.ep * partition.etp),
        "trained_expert_parameters": (zero + sum(op.num_trained_parameters for op in experts))
        / (partition.ep * partition.etp),
        "cast_frozen_parameters": zero + sum(cast_frozen_parameters_of(op, partition) for op in group.ops),
        "narrow_gather_bytes": zero + sum(narrow_gather_bytes_of(op, partition) for op in group.ops),
    }
    return values


def _width(group: BlockGroup) -> float:
    norms = [op.width for op in group.ops if isinstance(op, Norm)]
    return float(norms[0] if norms else next(op.dim for op in group.ops if isinstance(op, Embedding)))


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
