"""footprint: the peak memory of the fullest rank of each configuration, by tensor class.

Ranks of one pipeline stage hold the same, so that only pipeline ranks differ: the first has the embedding and, in most
schedules, the most microbatches in flight, the last the head and the logits; those between differ where stages are cut
unevenly or blocks are of several kinds. All that may be the fullest are weighed. Ignored: uneven routing of tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.layout_table import Bools, Floats, Ints, LayoutTable, take_rows
from meshwright.cost.memory.footprint_blocks import HostModelMemory, ModelMemory
from meshwright.cost.memory.footprint_constants import LIMIT_SHARE, SMI_BYTES
from meshwright.cost.memory.footprint_rank import HostRankFootprint, RankFootprint
from meshwright.cost.memory.footprint_rank_gaps import Parts, largest, total
from meshwright.cost.training_setup import Configurations, TrainingSetup
from meshwright.spec.machine.cluster import Cluster
from meshwright.spec.step.estimate import MemoryUse


@dataclass(frozen=True)
class Footprint:
    """MemoryUse of many configurations: the same fields, one element a configuration."""

    parameters_bytes: Floats
    gradients_bytes: Floats
    optimizer_state_bytes: Floats
    unsharded_parameters_bytes: Floats
    activations_bytes: Floats
    logits_bytes: Floats
    communication_buffers_bytes: Floats
    workspace_bytes: Floats
    fragmentation_bytes: Floats
    cached_bytes: Floats
    context_bytes: Floats

    def __len__(self) -> int:
        return len(self.context_bytes)

    @property
    def allocated_bytes(self) -> Floats:
        """Return the peak of allocated bytes."""
        return self.needed_bytes - self.fragmentation_bytes

    @property
    def needed_bytes(self) -> Floats:
        """Return the bytes that the allocator must have: it gives back what else it caches where the device is full."""
        return self.device_bytes - self.context_bytes

    @property
    def reserved_bytes(self) -> Floats:
        """Return the peak of reserved bytes."""
        return self.needed_bytes + self.cached_bytes

    @property
    def device_bytes(self) -> Floats:
        """Return all bytes that the device must have."""
        return np.asarray(sum(getattr(self, field.name) for field in fields(self))) - self.cached_bytes

    @property
    def smi_bytes(self) -> Floats:
        """Return what nvidia-smi shows of a trainer such as those the constant was fitted on."""
        return self.device_bytes + self.cached_bytes + SMI_BYTES

    def take(self, rows: NDArray[Any]) -> Footprint:
        """Return the configurations at `rows` (positions or a mask)."""
        return take_rows(self, rows)


def footprint(configs: Configurations, most_bytes: float = math.inf) -> Footprint:
    """Return the memory of each one's fullest pipeline rank, or of the first that needs more than `most_bytes`."""
    return _footprint(configs, None, most_bytes)


def footprint_of_rank(configs: Configurations, pp_rank: int | Ints) -> Footprint:
    """Return the memory of pipeline rank `pp_rank`, one for all or one each, which every layout must have."""
    assert (configs.layouts.pp > pp_rank).all(), f"pipeline rank {pp_rank} of {configs.layouts.pp.min()}"
    return _footprint(configs, np.broadcast_to(pp_rank, len(configs)))


def memory_use(memory: Footprint, row: int) -> MemoryUse:
    """Return one configuration's memory as a MemoryEstimate, in whole bytes rounded up."""
    return MemoryUse(**{field.name: math.ceil(getattr(memory, field.name)[row]) for field in fields(memory)})


def fits(memory: Footprint, configs: Configurations) -> Bools:
    """Return whether the bytes needed are no more than what the device has besides context and communication."""
    usable = configs.each(lambda setup: setup.cluster.device.usable_memory_bytes)
    return np.asarray(memory.needed_bytes <= usable)


def runs_at_limit(memory: Footprint, configs: Configurations) -> Bools:
    """Return whether each one runs, if need be at the limit of its device, where the allocator gives back pages."""
    usable = configs.each(lambda setup: setup.cluster.device.usable_memory_bytes)
    gives_back = configs.has(lambda setup: setup.stack.expandable_segments)
    return fits(memory, configs) | (gives_back & (memory.allocated_bytes * (1 + LIMIT_SHARE) <= usable))


def outside_bytes(cluster: Cluster) -> float:
    """Return what a process takes of the cluster's device outside of the allocator: context and communication."""
    return cluster.device.memory_bytes.value - cluster.device.usable_memory_bytes


def model_memory(setup: TrainingSetup, layouts: LayoutTable) -> ModelMemory:
    """Return what the parts of a setup's model take under each of `layouts`, on its kind of device."""
    return (HostModelMemory if setup.cluster.device.is_host else ModelMemory)(setup, layouts)


def host_activation_bytes(configs: Configurations) -> Floats:
    """Return the bytes of activations in the host's memory of the rank that has most; 0 without activation_offload."""
    most = np.zeros(len(configs))
    for position in np.unique(configs.setup_index[configs.layouts.activation_offload]):
        rows = np.flatnonzero((configs.setup_index == position) & configs.layouts.activation_offload)
        setup, numbers = configs.setups[position], configs.num_microbatches[rows]
        memory = model_memory(setup, configs.layouts.take(rows))
        ranks = [_rank_footprint(memory)(memory, numbers, pp_rank).kept.on_host for pp_rank in memory.ranks_to_weigh]
        most[rows] = np.max(ranks, axis=0)
    return most


def _rank_footprint(memory: ModelMemory) -> type[RankFootprint]:
    return HostRankFootprint if isinstance(memory, HostModelMemory) else RankFootprint


def _footprint(configs: Configurations, pp_rank: Ints | None, most_bytes: float = math.inf) -> Footprint:
    """Return the memory of each one's rank `pp_rank`; None for the fullest, or the first beyond `most_bytes`."""
    columns = {field.name: np.zeros(len(configs)) for field in fields(Footprint)}
    columns["context_bytes"] = configs.each(lambda setup: outside_bytes(setup.cluster))
    num_microbatches = configs.num_microbatches
    for position in np.unique(configs.setup_index):
        rows = np.flatnonzero(configs.setup_index == position)
        setup, layouts, numbers = configs.setups[position], configs.layouts.take(rows), num_microbatches[rows]
        memory = model_memory(setup, layouts)
        if pp_rank is None:
            parts = _fullest(memory, numbers, most_bytes)
        else:
            parts = _rank_footprint(memory)(memory, numbers, pp_rank[rows]).parts()
        for name, values in parts.items():
            columns[name][rows] = values
    return Footprint(**columns)


def _fullest(memory: ModelMemory, num_microbatches: Floats, most_bytes: float) -> Parts:
    """Return the bytes of each layout's fullest rank; a rank beyond `most_bytes` settles what does not fit."""
    pp_ranks, of_rank = memory.ranks_to_weigh, _rank_footprint(memory)
    parts = of_rank(memory, num_microbatches, pp_ranks[0]).parts()
    for before, pp_rank in pairwise(pp_ranks):
        rows = np.flatnonzero((pp_rank != before) & (total(parts) <= most_bytes))
        if len(rows):
            others = of_rank(memory.take(rows), num_microbatches[rows], pp_rank[rows]).parts()
            fuller = largest([{name: values[rows] for name, values in parts.items()}, others])
            for name, values in fuller.items():
                parts[name][rows] = values
    return parts
