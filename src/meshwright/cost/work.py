"""Work: what one rank does for one microbatch in each block, as flat tables of ops with their shapes and no price.

The op list of a block (ModelSpec) is divided by the layout's degrees:

    tokens        microbatch x seq_len / cp, between matmuls / tp (sequence parallel)
    matmul        columns: (tokens, out / tp, in)   rows: (tokens, out, in / tp)   none: (tokens between, out, in)
    experts       tokens / tp x etp x chosen rows in all, spread evenly over num_experts / ep of them x ep senders
    attention     heads / tp, each token with the mean of what it attends to

Matmuls that read the same tensor (query, key and value; gate and up) are one where the stack fuses them. Ignored:
biases, dropout, and the unevenness of tp degrees that do not divide a width. Router skew is a factor on the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.case import Cases, Floats, Setting
from meshwright.cost.layout_table import LayoutTable
from meshwright.spec.model_spec import BlockGroup
from meshwright.spec.op import Attention, Elementwise, Embedding, GroupedMatmul, Head, Matmul, Norm, Op, Rope

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

BLOCK, FIRST, LAST = 0, 1, 2
"""Kinds of owners: one block of a group, what stands before the blocks, what stands after them."""

KEY_FIELDS = ("tp", "cp", "ep", "etp", "microbatch_size")
"""All of a layout that the work of one microbatch in one block depends on."""


@dataclass(frozen=True)
class Matmuls:
    """One line for each matmul (or group of equal ones) of each owner."""

    owner: Ints
    m: Floats
    n: Floats
    k: Floats
    groups: Floats
    """Equal matmuls in one kernel, or one after the other."""
    is_expert: Bools
    is_low: Bools
    """Whether it is computed in the workload's precision; the head stays in 16 bits."""


@dataclass(frozen=True)
class Owners:
    """One line for each key and each block group: what its blocks do besides matmuls."""

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
    head_width: Floats
    score_elements: Floats
    """Elements of the whole matrix of scores, masked ones included."""
    kv_elements: Floats
    """Elements of the keys and values of this rank's part of the sequence."""
    memory_elements: Floats
    """Elements that memory-bound ops of the forward pass read and write."""
    biased_elements: Floats
    """Elements that experts' biases, clamps and scales read and write, an operator each."""
    loss_elements: Floats
    """Logits."""
    num_ops: Floats
    num_tp_collectives: Floats
    """All-gathers and reduce-scatters of the residual stream in the forward pass."""
    routed_copies: Floats
    """Experts that each token goes to; 0 in a dense block."""
    dense_parameters: Floats
    """Parameters that data-parallel ranks share, on this rank before they are sharded."""
    expert_parameters: Floats
    """The same of experts."""


@dataclass(frozen=True)
class Work:
    """The keys of all cases, and what each asks for."""

    key_of_case: Ints
    """Position of each case's key."""
    setting: Ints
    """Position of each key's setting."""
    keys: LayoutTable
    """One layout for each key; only KEY_FIELDS of it mean something."""
    owners: Owners
    matmuls: Matmuls


def work_of(cases: Cases) -> Work:
    """Return what the cases' ranks do, each distinct (setting, tp, cp, ep, etp, microbatch_size) once."""
    columns = np.stack([cases.setting, *(getattr(cases.layouts, name) for name in KEY_FIELDS)], axis=1)
    _, first, inverse = np.unique(columns, axis=0, return_index=True, return_inverse=True)
    setting, keys = cases.setting[first], cases.layouts.take(first)
    owners: list[dict[str, NDArray[Any]]] = []
    lines: list[dict[str, NDArray[Any]]] = []
    num_owners = 0
    for position in np.unique(setting):
        rows = np.flatnonzero(setting == position)
        for group, kind in groups_of(cases.settings[position]):
            index = num_owners + np.arange(len(rows))
            shares = Shares(cases.settings[position], keys.take(rows))
            owners.append({"key": rows, **_owner(group, kind, shares)})
            lines += [{"owner": index, **line} for line in _matmuls(group, shares)]
            num_owners += len(rows)
    return Work(inverse.ravel(), setting, keys, Owners(**_joined(Owners, owners)), Matmuls(**_joined(Matmuls, lines)))


class Shares:
    """One setting's tokens and degrees, one element a key."""

    def __init__(self, setting: Setting, keys: LayoutTable) -> None:
        self.seq_len = setting.workload.seq_len
        self.tp, self.ep, self.etp = keys.tp, keys.ep, keys.etp
        self.tokens = keys.microbatch_size * self.seq_len / keys.cp
        self.cp = keys.cp
        self.tokens_between = self.tokens / keys.tp if setting.stack.sequence_parallel else self.tokens
        self.fuses = setting.stack.kernels == "fused"


def groups_of(setting: Setting) -> Iterator[tuple[BlockGroup, int]]:
    """Yield the model's groups and their kinds: the ones without a matmul before the blocks are FIRST."""
    groups = setting.model.groups
    for group in groups:
        if any(isinstance(op, Head) for op in group.ops):
            yield group, LAST
        elif any(isinstance(op, Embedding) for op in group.ops):
            yield group, FIRST
        else:
            yield group, BLOCK


def _owner(group: BlockGroup, kind: int, shares: Shares) -> dict[str, NDArray[Any]]:
    cores = [op for op in group.ops if isinstance(op, Attention)]
    routed = [op.experts_per_token for op in group.ops if isinstance(op, GroupedMatmul)]
    core = cores[0] if cores else None
    tokens, zero = shares.tokens, np.zeros_like(shares.tokens)
    heads = 0.0 if core is None else core.num_heads / shares.tp
    kv_heads = 0.0 if core is None else np.maximum(core.num_kv_heads / shares.tp, 1)
    head_width = 0.0 if core is None else (core.head_dim + core.value_head_dim) / 2
    context = 1.0 if core is None else core.mean_context(shares.seq_len)
    values = {
        "kind": zero + kind,
        "count": zero + group.count,
        "tokens": tokens,
        "width": zero + _width(group),
        "attention_flops": 4 * tokens * heads * head_width * context,
        "context": zero + context,
        "head_width": zero + head_width,
        "score_elements": tokens * heads * shares.seq_len,
        "kv_elements": 2 * tokens * kv_heads * head_width,
        "memory_elements": zero + sum(moved_elements(op, shares) for op in group.ops if not op.name.endswith("bias")),
        "biased_elements": zero + sum(moved_elements(op, shares) for op in group.ops if op.name.endswith("bias")),
        "loss_elements": zero + sum(tokens * op.vocab_size / shares.tp for op in group.ops if isinstance(op, Head)),
        "num_ops": zero + len(group.ops),
        "num_tp_collectives": zero + _num_tp_collectives(group, shares),
        "routed_copies": zero + (max(routed) if routed else 0),
        "dense_parameters": zero + sum(_dense_parameters(op, shares) for op in group.ops),
        "expert_parameters": zero + sum(op.num_parameters for op in group.ops if isinstance(op, GroupedMatmul)),
    }
    values["expert_parameters"] = values["expert_parameters"] / (shares.ep * shares.etp)
    return values


def _width(group: BlockGroup) -> float:
    norms = [op.width for op in group.ops if isinstance(op, Norm)]
    return float(norms[0] if norms else next(op.dim for op in group.ops if isinstance(op, Embedding)))


def _dense_parameters(op: Op, shares: Shares) -> Floats:
    if isinstance(op, GroupedMatmul):
        return np.zeros_like(shares.tokens)
    is_split = isinstance(op, Embedding | Head) or (isinstance(op, Matmul) and op.tensor_split != "none")
    return op.num_parameters / (shares.tp if is_split else np.ones_like(shares.tokens))


def _num_tp_collectives(group: BlockGroup, shares: Shares) -> Floats:
    """Return 2 for each pair of column and row matmuls, where tp > 1: attention, a dense ffn, shared experts."""
    num_rows = float(sum(isinstance(op, Matmul) and op.tensor_split == "rows" for op in group.ops))
    num_rows += sum(isinstance(op, Head) for op in group.ops) * 0.5
    # Split experts gather and scatter each token's copies.
    copies = max((op.experts_per_token for op in group.ops if isinstance(op, GroupedMatmul)), default=0)
    return np.where(shares.tp > 1, 2.0 * num_rows + np.where(shares.etp > 1, 2.0 * copies, 0.0), 0.0)


def moved_elements(op: Op, shares: Shares) -> Floats:
    """Return the elements that a memory-bound op reads and writes in the forward pass; 0 of the others."""
    tokens, between, tp = shares.tokens, shares.tokens_between, shares.tp
    if isinstance(op, Norm):
        is_between = not op.name.startswith("attention.")
        return 2.0 * op.width * op.vectors_per_token * (between if is_between else tokens / tp)
    if isinstance(op, Rope):
        return 2.0 * op.num_heads * op.head_dim * tokens / tp
    if isinstance(op, Embedding):
        return 2.0 * op.dim * between
    if isinstance(op, Elementwise):
        elements = float(op.reads_per_token + op.writes_per_token)
        is_whole_width = op.name in ("ffn.to_rows", "ffn.from_rows")
        if op.name.endswith("residual") or op.name == "ffn.mix":
            return elements * between
        return elements * tokens / tp * (shares.etp if is_whole_width else 1.0)
    return np.zeros_like(tokens)


def _matmuls(group: BlockGroup, shares: Shares) -> Iterator[dict[str, NDArray[Any]]]:
    one = np.ones_like(shares.tokens)
    for op, num_fused in _fused(group.ops) if shares.fuses else [(op, 1.0) for op in group.ops]:
        if isinstance(op, Matmul):
            columns = shares.tp if op.tensor_split == "columns" else one
            rows = shares.tp if op.tensor_split == "rows" else one
            tokens = shares.tokens_between if op.tensor_split == "none" else shares.tokens
            yield _line(tokens, num_fused * op.out_features / columns, op.in_features / rows, one)
        elif isinstance(op, GroupedMatmul):
            num_local = op.num_experts / shares.ep
            rows = shares.tokens / shares.tp * shares.etp * op.experts_per_token / num_local
            is_down = op.name.endswith(".down")
            n = num_fused * op.out_features / (one if is_down else shares.etp)
            k = op.in_features / (shares.etp if is_down else one)
            yield _line(rows, n, k, num_local, is_expert=True)
        elif isinstance(op, Head):
            yield _line(shares.tokens, op.vocab_size / shares.tp, op.dim * one, one, is_low=False)


def _fused(ops: tuple[Op, ...]) -> Iterator[tuple[Op, float]]:
    """Yield the ops, neighbours that multiply the same tensor joined: how many times as wide the first one is."""
    matmuls = [op for op in ops if isinstance(op, Matmul | GroupedMatmul)]
    joined = {id(after) for before, after in pairwise(matmuls) if _reads_the_same(before, after)}
    for op in ops:
        if id(op) in joined:
            continue
        width = 1.0
        if isinstance(op, Matmul | GroupedMatmul):
            following = matmuls[next(i for i, other in enumerate(matmuls) if other is op) + 1 :]
            total = float(op.out_features)
            for other in following:
                if id(other) not in joined:
                    break
                total += other.out_features
            width = total / op.out_features
        yield op, width


def _reads_the_same(before: Matmul | GroupedMatmul, after: Matmul | GroupedMatmul) -> bool:
    if type(before) is not type(after) or before.in_features != after.in_features:
        return False
    is_split = not isinstance(before, Matmul) or before.tensor_split == "columns"
    same_split = not isinstance(before, Matmul) or before.tensor_split == getattr(after, "tensor_split", None)
    return is_split and same_split and before.name.rpartition(".")[0] == after.name.rpartition(".")[0]


def _line(
    m: Floats, n: Floats, k: Floats, groups: Floats, is_expert: bool = False, is_low: bool = True
) -> dict[str, NDArray[Any]]:
    flags = np.zeros(len(groups), np.bool_)
    return {"m": m, "n": n, "k": k, "groups": groups, "is_expert": flags | is_expert, "is_low": flags | is_low}


def _joined(table: type, parts: list[dict[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    """Return the columns of all `parts` one after the other."""
    lengths = [len(next(iter(part.values()))) for part in parts]
    columns = {}
    for field in fields(table):
        columns[field.name] = np.concatenate(
            [np.broadcast_to(part[field.name], (n,)) for part, n in zip(parts, lengths, strict=True)]
        )
    return columns
