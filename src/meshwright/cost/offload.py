"""cpu_offload: what it takes that parameters, gradients and optimizer state wait in the host's memory.

    copies   (gathers + reductions) x 4 bytes of each parameter / PCIe: to the device, and gradients back
    host     bytes of each parameter / the rank's share of the host's memory bandwidth: 28 of AdamW, 12 of the norm and
             of clipping by it, 8 of scaling sums to means, 12 of adding up each further microbatch that is reduced
    memory   16 bytes of each parameter: float32 weights, gradients and two moments

Rates are those of host_memory.py. Ignored: copies that hide behind computation,
which FSDP2's do in part.
"""

from __future__ import annotations

import numpy as np

from meshwright.cost.case import Cases, Floats
from meshwright.cost.host_memory import HOST_BYTES, HOST_BYTES_PER_S, PCIE_BYTES_PER_S

_STATE_BYTES = 16.0
_UPDATE_BYTES, _CLIP_BYTES, _SCALE_BYTES, _SUM_BYTES = 28.0, 12.0, 8.0, 12.0


def copies_s(cases: Cases) -> Floats:
    """Return the seconds that copies of parameters and gradients add to each step; 0 where a layout has none."""
    layouts = cases.layouts
    # Each microbatch gathers forward and backward, or once in all where parameters are kept.
    is_freed = layouts.is_resharded & (layouts.fsdp > 1)
    gathers = np.where(is_freed, 2 * cases.num_microbatches, 1.0)
    copied_s = _own_parameters(cases) * 4 * (gathers + _reductions(cases)) / PCIE_BYTES_PER_S
    return np.where(layouts.cpu_offload, copied_s, 0.0)


def host_s(cases: Cases) -> Floats:
    """Return the seconds in which the host sums, scales and clips gradients and updates parameters in each step."""
    layouts, per_node = cases.layouts, cases.each(lambda setting: setting.cluster.devices_per_node)
    is_scaled = cases.num_microbatches * layouts.dp * layouts.cp > 1
    num_bytes = _UPDATE_BYTES + _CLIP_BYTES + _SCALE_BYTES * is_scaled + _SUM_BYTES * (_reductions(cases) - 1)
    seconds = _own_parameters(cases) * num_bytes * per_node / HOST_BYTES_PER_S
    return np.where(layouts.cpu_offload, seconds, 0.0)


def _reductions(cases: Cases) -> Floats:
    """Return how often in a step gradients are copied to the host."""
    # Sums over replicas, which follow the last microbatch, are of what the device holds.
    is_each = cases.layouts.reduces_each_microbatch & (cases.layouts.dp_replicate == 1)
    return np.where(is_each, cases.num_microbatches, 1.0)


def host_headroom_bytes(cases: Cases) -> Floats:
    """Return what offload leaves to each rank of its share of the host's memory; infinite where a layout has none."""
    share = HOST_BYTES / cases.each(lambda setting: setting.cluster.devices_per_node)
    return np.where(cases.layouts.cpu_offload, share - _STATE_BYTES * _own_parameters(cases), np.inf)


def _own_parameters(cases: Cases) -> Floats:
    """Return the parameters that each rank keeps a part of the state for."""
    parameters = cases.each(lambda setting: setting.model.num_parameters)
    return np.asarray(parameters * cases.layouts.dp_replicate / cases.layouts.num_ranks)
