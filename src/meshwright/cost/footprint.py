"""footprint: the peak memory of the fullest rank of each case, by tensor class.

Ranks of one pipeline stage hold the same, so that only pipeline ranks differ: the first has the embedding and, in most
schedules, the most microbatches in flight, the last the head and the logits; those between differ where stages are cut
unevenly or blocks are of several kinds. All that may be the fullest are weighed. Ignored: uneven routing of tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.case import Cases, Floats
from meshwright.cost.footprint_blocks import Memory
from meshwright.cost.footprint_constants import SMI_BYTES
from meshwright.cost.footprint_rank import largest, rank_parts
from meshwright.spec.cluster import Cluster
from meshwright.spec.estimate import MemoryUse


@dataclass(frozen=True)
class Footprint:
    """MemoryUse of many cases: the same fields, one element a case."""

    parameters_bytes: Floats
    gradients_bytes: Floats
    optimizer_bytes: Floats
    gathered_bytes: Floats
    activations_bytes: Floats
    logits_bytes: Floats
    buffers_bytes: Floats
    workspace_bytes: Floats
    fragmentation_bytes: Floats
    context_bytes: Floats

    def __len__(self) -> int:
        return len(self.context_bytes)

    @property
    def allocated_bytes(self) -> Floats:
        """Return the peak of allocated bytes."""
        return self.reserved_bytes - self.fragmentation_bytes

    @property
    def reserved_bytes(self) -> Floats:
        """Return the peak of reserved bytes."""
        return self.device_bytes - self.context_bytes

    @property
    def device_bytes(self) -> Floats:
        """Return all bytes that the device must have."""
        return np.asarray(sum(getattr(self, field.name) for field in fields(self)))

    @property
    def smi_bytes(self) -> Floats:
        """Return what nvidia-smi shows of a trainer such as those the constant was fitted on."""
        return self.device_bytes + SMI_BYTES

    def take(self, rows: NDArray[Any]) -> Footprint:
        """Return the cases at `rows` (positions or a mask)."""
        return Footprint(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})


def footprint(cases: Cases) -> Footprint:
    """Return the memory of each case's fullest pipeline rank."""
    return _footprint(cases, None)


def footprint_of_rank(cases: Cases, pp_rank: int) -> Footprint:
    """Return the memory of pipeline rank `pp_rank`, which every case must have."""
    assert (cases.layouts.pp > pp_rank).all(), f"pipeline rank {pp_rank} of {cases.layouts.pp.min()}"
    return _footprint(cases, pp_rank)


def memory_use(memory: Footprint, row: int) -> MemoryUse:
    """Return one case's memory as the noun, in whole bytes rounded up."""
    return MemoryUse(**{field.name: math.ceil(getattr(memory, field.name)[row]) for field in fields(memory)})


def fits(memory: Footprint, cases: Cases) -> NDArray[np.bool_]:
    """Return which cases' reserved bytes are no more than what their device has beside context and communication."""
    usable = cases.each(lambda setting: setting.cluster.device.usable_memory_bytes)
    return np.asarray(memory.reserved_bytes <= usable)


def outside_bytes(cluster: Cluster) -> float:
    """Return what a process takes of the cluster's device outside of the allocator: context and communication."""
    return cluster.device.memory_bytes.value - cluster.device.usable_memory_bytes


def _footprint(cases: Cases, pp_rank: int | None) -> Footprint:
    """Return the memory of each case's rank `pp_rank`; None for the fullest."""
    columns = {field.name: np.zeros(len(cases)) for field in fields(Footprint)}
    columns["context_bytes"] = cases.each(lambda setting: outside_bytes(setting.cluster))
    num_microbatches = cases.num_microbatches
    for position in np.unique(cases.setting):
        rows = np.flatnonzero(cases.setting == position)
        memory = Memory(cases.settings[position], cases.layouts.take(rows))
        pp_ranks = memory.ranks_to_weigh if pp_rank is None else np.full((1, len(rows)), pp_rank)
        ranks = [rank_parts(memory, num_microbatches[rows], each) for each in pp_ranks]
        for name, values in largest(ranks).items():
            columns[name][rows] = values
    return Footprint(**columns)
