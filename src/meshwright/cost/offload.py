"""cpu_offload: what it takes that parameters, gradients and optimizer state wait in the host's memory.

    copies   (gathers + reductions) x 4 bytes of each parameter / PCIe: to the device, and gradients back
    update   28 bytes of each parameter / the rank's share of the host's memory bandwidth: AdamW runs on the host
    memory   16 bytes of each parameter: float32 weights, gradients and two moments

Figures are those of a usual server, which no catalogue entry states: PCIe 5 x16 moves 63 GB/s each way by its
specification, of which copies reach about four fifths; 2 TB for 8 devices is a DGX H100's (NVIDIA's datasheet);
eight channels of DDR5-4800 for each of two processors are 614 GB/s. Ignored: copies that hide behind computation,
which FSDP2's do in part.
"""

from __future__ import annotations

import numpy as np

from meshwright.cost.case import Cases, Floats

PCIE_BYTES_PER_S = 0.8 * 63e9
HOST_BYTES_PER_S = 614e9
HOST_BYTES = 2e12
_STATE_BYTES = 16.0
_UPDATE_BYTES = 28.0


def offload_s(cases: Cases) -> Floats:
    """Return the seconds that offload adds to each step; 0 where a layout has none."""
    layouts, per_node = cases.layouts, cases.each(lambda setting: setting.cluster.devices_per_node)
    # Each microbatch gathers forward and backward, or once in all where parameters are kept.
    gathers = np.where(layouts.is_resharded, 2 * cases.num_microbatches, 1.0)
    # Sums over replicas, which follow the last microbatch, are of what the device holds.
    is_each = layouts.reduces_each_microbatch & (layouts.dp_replicate == 1)
    reductions = np.where(is_each, cases.num_microbatches, 1.0)
    copied_s = _own_parameters(cases) * 4 * (gathers + reductions) / PCIE_BYTES_PER_S
    updated_s = _own_parameters(cases) * _UPDATE_BYTES * per_node / HOST_BYTES_PER_S
    return np.where(layouts.cpu_offload, copied_s + updated_s, 0.0)


def host_headroom_bytes(cases: Cases) -> Floats:
    """Return what offload leaves to each rank of its share of the host's memory; infinite where a layout has none."""
    share = HOST_BYTES / cases.each(lambda setting: setting.cluster.devices_per_node)
    return np.where(cases.layouts.cpu_offload, share - _STATE_BYTES * _own_parameters(cases), np.inf)


def _own_parameters(cases: Cases) -> Floats:
    """Return the parameters that each rank keeps a part of the state for."""
    parameters = cases.each(lambda setting: setting.model.num_parameters)
    return np.asarray(parameters * cases.layouts.dp_replicate / cases.layouts.num_ranks)
