"""LayoutTable: many layouts as arrays, one element a layout, so that formulas price all of them at once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import UnsupportedError
from meshwright.spec.layout.attention_backend import SPARSE_BACKENDS, AttentionBackend
from meshwright.spec.layout.layout import (
    SCHEDULES,
    SPLIT_BACKWARD_SCHEDULES,
    ActivationCheckpoint,
    ContextMethod,
    Layout,
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Passes = tuple[Floats, Floats]
"""Forward and backward."""

_Table = TypeVar("_Table")


def take_rows(table: _Table, rows: NDArray[Any]) -> _Table:
    """Return a dataclass of arrays, or of such tables, with those elements of their last axis (positions or a mask)."""
    assert is_dataclass(table)
    assert not isinstance(table, type)

    def taken(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value[..., rows]
        return take_rows(value, rows) if is_dataclass(value) else value

    return replace(table, **{field.name: taken(getattr(table, field.name)) for field in fields(table)})


ACTIVATION_CHECKPOINTS: tuple[str, ...] = get_args(ActivationCheckpoint)
CONTEXT_METHODS: tuple[str, ...] = get_args(ContextMethod)
ATTENTION_BACKENDS: tuple[AttentionBackend, ...] = get_args(AttentionBackend)

_CODES: dict[str, tuple[str, ...]] = {
    "schedule": SCHEDULES,
    "activation_checkpoint": ACTIVATION_CHECKPOINTS,
    "cp_method": CONTEXT_METHODS,
    "attention_backend": ATTENTION_BACKENDS,
}
"""Fields that hold the position of a word in a tuple, not the word."""


@dataclass(frozen=True)
class LayoutTable:
    """Layouts as equally long arrays; a word is its position in SCHEDULES, ACTIVATION_CHECKPOINTS, CONTEXT_METHODS or
    ATTENTION_BACKENDS.
    """

    pp: Ints
    dp_replicate: Ints
    dp_shard: Ints
    cp: Ints
    tp: Ints
    ep: Ints
    etp: Ints
    microbatch_size: Ints
    schedule: Ints
    stages_per_rank: Ints
    activation_checkpoint: Ints
    activation_checkpoint_every: Ints
    cp_method: Ints
    attention_backend: Ints
    is_resharded: Bools
    """Whether unsharded parameters are freed after forward."""
    kept_on: Ints
    """Ranks of a group that keeps a copy of what is freed (reshard_after_forward = n); 0 where none does."""
    prefetch: Ints
    reduces_each_microbatch: Bools
    """Whether gradients are reduce-scattered after each microbatch, not once a step."""
    async_tp: Bools
    separate_reduce_group: Bools
    communication_sms: Ints
    """Most SMs of a collective's kernel; 0 for NCCL's own choice."""
    cpu_offload: Bools
    activation_offload: Bools
    loss_chunks: Ints
    """Chunks of tokens in which head and loss are computed; 1 for all logits at once."""
    compile: Bools
    """Whether torch.compile compiles anything."""
    has_model_graph: Bools
    """Whether that is one graph of the whole model, where it does; else blocks."""
    compile_loss: Bools
    compile_optimizer: Bools
    cuda_graphs: Bools
    checkpoint_of_block: Ints | None = None
    """What each block saves [layouts, blocks], as in activation_checkpoint; None where no layout says it one by one."""
    first_blocks: Ints | None = None
    """First block of every stage but the first [layouts, stages], -1 for none; None where no layout says it. What is
    not as many as a layout's stages does not count."""

    def __len__(self) -> int:
        return len(self.pp)

    @property
    def dp(self) -> Ints:
        """Return the data-parallel degrees."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> Ints:
        """Return the ranks that share one copy of the dense parameters."""
        return self.dp_shard * self.cp

    @property
    def expert_dp_shard(self) -> Ints:
        """Return the ranks that share one copy of a rank's experts."""
        return self.dp_shard * self.cp * self.tp // (self.ep * self.etp)

    @property
    def num_ranks(self) -> Ints:
        """Return the ranks."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def is_replicated(self) -> Bools:
        """Return where each rank holds the whole model, on its device."""
        return np.asarray((self.num_ranks == self.dp_replicate) & ~self.cpu_offload)

    @property
    def num_stages(self) -> Ints:
        """Return the pipeline stages over all pipeline ranks."""
        return self.pp * self.stages_per_rank

    @property
    def splits_backward(self) -> Bools:
        """Return whether a stage's backward runs in two parts."""
        return np.asarray((self.pp > 1) & self.has_schedule(SPLIT_BACKWARD_SCHEDULES))

    @property
    def compiles_blocks(self) -> Bools:
        """Return whether blocks are compiled, alone or in a model's graph (Layout.compiles_blocks)."""
        has_eager_part = (self.ep > 1) | self.has_eager_attention
        is_selective = self.activation_checkpoint == ACTIVATION_CHECKPOINTS.index("selective")
        return np.asarray(self.compile & ~(has_eager_part & is_selective))

    @property
    def compiles_model(self) -> Bools:
        """Return whether the model is one graph (layout.compile = "model")."""
        return np.asarray(self.compile & self.has_model_graph)

    @property
    def has_eager_attention(self) -> Bools:
        """Return whether attention stays out of compiled blocks (Layout.has_eager_attention)."""
        is_ring = (self.cp > 1) & (self.cp_method == CONTEXT_METHODS.index("ring"))
        return np.asarray(is_ring | self.has_sparse_attention)

    @property
    def has_sparse_attention(self) -> Bools:
        """Return whether the attention backend skips scores that a mask hides."""
        return np.array([name in SPARSE_BACKENDS for name in ATTENTION_BACKENDS])[self.attention_backend]

    def has_schedule(self, names: Collection[str]) -> Bools:
        """Return whether the schedule is one of `names`."""
        return np.array([name in names for name in SCHEDULES])[self.schedule]

    @property
    def reshards_by_default(self) -> Bools:
        """Return where `reshard_after_forward = "auto"` frees unsharded parameters after forward."""
        return np.asarray(self.pp == 1)

    @property
    def reduces_each_by_default(self) -> Bools:
        """Return where `gradient_sync = "auto"` reduces gradients after each microbatch."""
        return np.asarray((self.fsdp > 1) & (self.pp == 1))

    def take(self, rows: NDArray[Any]) -> LayoutTable:
        """Return the layouts at `rows` (positions or a mask)."""
        return replace(self, **{name: column[rows] for name, column in self.columns().items()})

    def layout(self, row: int) -> Layout:
        """Return the Layout at `row`."""
        values = {name: column[row].tolist() for name, column in self.columns().items()}
        if (blocks := values.pop("checkpoint_of_block", None)) is not None:
            alike = set(blocks) == {values["activation_checkpoint"]}
            values["activation_checkpoint_blocks"] = (
                None if alike else tuple(ACTIVATION_CHECKPOINTS[code] for code in blocks)
            )
        if (firsts := values.pop("first_blocks", None)) is not None:
            firsts = tuple(first for first in firsts if first >= 0)
            is_own = len(firsts) == self.num_stages[row] - 1 > 0
            values["stage_boundaries"] = firsts if is_own else None
        for name, words in _CODES.items():
            values[name] = words[values[name]]
        values["virtual_stages"] = values.pop("stages_per_rank")
        if values.pop("has_model_graph") and values["compile"]:
            values["compile"] = "model"
        values["communication_sms"] = values["communication_sms"] or None
        group = values.pop("kept_on") or "always"
        values["reshard_after_forward"] = group if values.pop("is_resharded") else "never"
        values["gradient_sync"] = "microbatch" if values.pop("reduces_each_microbatch") else "step"
        return Layout(**values)

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return the columns that there are, by name."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: column for name, column in columns.items() if column is not None}


def layout_table(layouts: Sequence[Layout]) -> LayoutTable:
    """Return the layouts as arrays; raises UnsupportedError for a schedule from a file, and for what is not chosen yet.

    Where one says what each block saves, all have to, or to be as many blocks.
    """
    unknown = sorted({layout.schedule for layout in layouts} - set(SCHEDULES))
    if unknown:
        raise UnsupportedError(
            f"layout.schedule = {unknown[0]!r} is a file, which formulas cannot price: ask meshwright simulate, or "
            f"set it to one of {', '.join(SCHEDULES)}"
        )
    if any(layout.activation_checkpoint == "auto" for layout in layouts):
        raise UnsupportedError(
            'layout.activation_checkpoint = "auto" is settled before it is priced: set it to '
            f"{', '.join(ACTIVATION_CHECKPOINTS)}"
        )
    if any(layout.compile == "auto" for layout in layouts):
        raise UnsupportedError('layout.compile = "auto" is settled before it is priced: set it to true or false')
    if any(layout.attention_backend == "math" for layout in layouts):
        raise UnsupportedError(
            'layout.attention_backend = "math" computes attention by matmuls in float32, for comparison, which '
            "formulas do not price: ask meshwright simulate, or set it to auto"
        )
    columns: dict[str, NDArray[Any]] = {}
    for field in fields(LayoutTable):
        if field.name in ("checkpoint_of_block", "first_blocks"):
            continue
        words = _CODES.get(field.name)
        values = [_value(layout, field.name) for layout in layouts]
        columns[field.name] = np.array([words.index(value) for value in values] if words else values)
    return LayoutTable(
        **columns, checkpoint_of_block=_checkpoint_of_block(layouts), first_blocks=_first_blocks(layouts)
    )


def _first_blocks(layouts: Sequence[Layout]) -> Ints | None:
    width = max((len(layout.stage_boundaries or ()) for layout in layouts), default=0)
    if width == 0:
        return None
    rows = [layout.stage_boundaries or () for layout in layouts]
    return np.array([(*row, *(-1,) * (width - len(row))) for row in rows], np.int64)


def _checkpoint_of_block(layouts: Sequence[Layout]) -> Ints | None:
    num_blocks = max((len(layout.activation_checkpoint_blocks or ()) for layout in layouts), default=0)
    if num_blocks == 0:
        return None
    words = [[layout.checkpoint_of(block) for block in range(num_blocks)] for layout in layouts]
    return np.array([[ACTIVATION_CHECKPOINTS.index(word) for word in row] for row in words])


def concatenate(tables: Sequence[LayoutTable]) -> LayoutTable:
    """Return the layouts of all `tables`, in order; all have the same columns."""
    names = [field.name for field in fields(LayoutTable) if getattr(tables[0], field.name) is not None]
    return LayoutTable(**{name: np.concatenate([getattr(table, name) for table in tables]) for name in names})


def _value(layout: Layout, name: str) -> Any:
    if name == "kept_on":
        return layout.reshard_after_forward if isinstance(layout.reshard_after_forward, int) else 0
    if name == "has_model_graph":
        return layout.compile == "model"
    if name == "communication_sms":
        return layout.communication_sms or 0
    return bool(layout.compile) if name == "compile" else getattr(layout, name)


def distinct_rows(columns: Iterable[NDArray[Any]]) -> tuple[Ints, Ints]:
    """Return the first row of each combination of values in integer or boolean columns, and each row's combination."""
    first, which = np.zeros(1, np.int64), np.zeros(0, np.int64)
    for column in columns:
        if not len(which):
            which = np.zeros(len(column), np.int64)
            first = first[: len(column)]
        # Most columns of most tables have one value.
        if len(column) == 0 or (column == column[0]).all():
            continue
        _, value = np.unique(column, return_inverse=True)
        _, first, which = np.unique(which * len(value) + value, return_index=True, return_inverse=True)
    return first, which
