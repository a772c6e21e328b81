"""Seconds of copies to the host's memory, of operators that run on the host, and of cpu_offload.

    copy        bytes / PCIe, of one direction
    operator    bytes / the rank's share of the host's memory bandwidth

With cpu_offload parameters, gradients and optimizer state wait in the host's memory:

    copies      4 bytes of each of a unit's parameters / PCIe: before each gather, and of gradients after each reduction
    host        bytes of each parameter of the fullest pipeline rank, as an operator's: 8 of scaling sums to means, 4 of
                the norm, for which the other ranks wait, 8 of clipping by it, 28 of AdamW, 12 of adding up each further
                microbatch that is reduced
    memory      16 bytes of each parameter: float32 weights, gradients and two moments; activations that wait there
                (activation_copies.py) are counted next to them

Figures are those of a usual server, which no catalogue entry states (constants.toml). What hides copies:
fsdp_exposed.py. Ignored: devices that share a PCIe switch, and caches of the host.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meshwright.cost.compute.op_table import is_free, moved_bytes
from meshwright.cost.constants import fixed_constant
from meshwright.cost.layout_table import Bools, Floats, LayoutTable
from meshwright.cost.memory.footprint_stages import fullest_parameters
from meshwright.cost.memory.footprint_states import state_bytes
from meshwright.cost.training_setup import Configurations, TrainingSetup
from meshwright.spec.trace.trace import Signature

PCIE_BYTES_PER_S = fixed_constant("pcie_share") * fixed_constant("pcie_bytes_per_s")
HOST_BYTES_PER_S = fixed_constant("host_bytes_per_s")
HOST_BYTES = fixed_constant("host_bytes")


def copy_seconds(signature: Signature) -> float:
    """Return the seconds of a copy between the memories of the host and the device."""
    return _copied_bytes(signature) / PCIE_BYTES_PER_S


def host_seconds(signatures: Sequence[Signature], devices_per_node: int) -> Floats:
    """Return what operators that run on the host take it [signatures]; 0 of those that run on the device."""
    rate = HOST_BYTES_PER_S / devices_per_node
    is_here = [one.place == "host" and not is_free(one) for one in signatures]
    return np.array(
        [moved_bytes(one) / rate if here else 0.0 for one, here in zip(signatures, is_here, strict=True)], np.float64
    )


def _copied_bytes(signature: Signature) -> float:
    """Return the bytes that travel: those of the source, since a device converts what it has, or will have."""
    if signature.outputs and len(signature.inputs) == 1:
        return float(min(signature.read_bytes, signature.written_bytes))
    # In place, the target is among what is read.
    return signature.read_bytes / 2


_STATE_BYTES, _PARAMETER_BYTES = 16.0, 4.0
_UPDATE_BYTES, _CLIP_BYTES, _NORM_BYTES, _SCALE_BYTES, _SUM_BYTES = 28.0, 8.0, 4.0, 8.0, 12.0


def copy_s(layouts: LayoutTable, own_parameters: Floats) -> Floats:
    """Return the seconds in which a rank's part of parameters, or of gradients, crosses PCIe; 0 without offload."""
    return np.where(layouts.cpu_offload, own_parameters * 4 / PCIE_BYTES_PER_S, 0.0)


def sums_on_host(layouts: LayoutTable) -> Bools:
    """Return where the host adds each microbatch's gradients to those before."""
    # Sums over replicas, which follow the last microbatch, are of what the device holds.
    return np.asarray(layouts.cpu_offload & layouts.reduces_each_microbatch & (layouts.dp_replicate == 1))


class HostUpdate(NamedTuple):
    """Seconds of a step in which hosts sum, scale and clip gradients and update parameters; 0 without cpu_offload."""

    host_s: Floats
    """Of the host, in the mean over ranks until the norm of gradients is known, then of the fullest pipeline rank."""
    waited_s: Floats
    """In which ranks wait for the fullest one's part of the norm, in the mean over ranks."""

    @property
    def total_s(self) -> Floats:
        """Return the seconds of both."""
        return self.host_s + self.waited_s


def host_update(configs: Configurations) -> HostUpdate:
    """Return the seconds of each configuration's update by the host."""
    layouts, per_node = configs.layouts, configs.each(lambda setup: setup.cluster.devices_per_node)
    is_scaled = configs.num_microbatches * layouts.dp * layouts.cp > 1
    num_sums = np.where(sums_on_host(layouts), configs.num_microbatches - 1, 0)
    before = _NORM_BYTES + _SCALE_BYTES * is_scaled + _SUM_BYTES * num_sums
    of_mean = np.where(layouts.cpu_offload, _own_parameters(configs), 0.0)
    fullest = np.zeros(len(configs))
    for position in np.unique(configs.setup_index[layouts.cpu_offload]):
        rows = np.flatnonzero((configs.setup_index == position) & layouts.cpu_offload)
        fullest[rows] = fullest_parameters(configs.setups[position], layouts.take(rows))
    fullest = np.maximum(fullest, of_mean)
    byte_s = per_node / HOST_BYTES_PER_S
    after_s = fullest * (_CLIP_BYTES + _UPDATE_BYTES) * byte_s
    return HostUpdate(of_mean * before * byte_s + after_s, (fullest - of_mean) * before * byte_s)


def host_headroom_bytes(configs: Configurations, activations_bytes: Floats | float = 0.0) -> Floats:
    """Return what offload of state and of `activations_bytes`, and managed memory, leave to each rank of its share of
    the host's memory; infinite where a layout has none of them.
    """
    layouts = configs.layouts
    share = HOST_BYTES / configs.each(lambda setup: setup.cluster.devices_per_node)
    held = _STATE_BYTES * _own_parameters(configs) + _PARAMETER_BYTES * _own_frozen_parameters(configs)
    state = np.where(layouts.cpu_offload, held, 0.0)
    managed = np.where(layouts.cpu_offload, 0.0, _managed_bytes(configs))
    is_used = layouts.cpu_offload | layouts.activation_offload | (managed > 0)
    return np.where(is_used, share - state - managed - activations_bytes, np.inf)


def _managed_bytes(configs: Configurations) -> Floats:
    """Return the bytes of each rank's managed memory (memory.* = "uvm")."""
    states = configs.each(lambda setup: _state_bytes(setup) * setup.pools_optimizer_state)
    embedding = configs.each(lambda setup: _PARAMETER_BYTES * _embedding_parameters(setup) * setup.pools_embedding)
    layouts = configs.layouts
    return np.asarray(states * _own_parameters(configs) + embedding / (layouts.fsdp * layouts.tp))


def _state_bytes(setup: TrainingSetup) -> float:
    return state_bytes(setup.workload, setup.stack).shared_optimizer


def _embedding_parameters(setup: TrainingSetup) -> float:
    return float(sum(op.num_parameters for op in setup.model.groups[0].ops))


def _own_parameters(configs: Configurations) -> Floats:
    """Return the parameters that each rank keeps a part of the state for."""
    parameters = configs.each(lambda setup: setup.trained_model.num_trained_parameters)
    return np.asarray(parameters * configs.layouts.dp_replicate / configs.layouts.num_ranks)


def _own_frozen_parameters(configs: Configurations) -> Floats:
    """Return those that each rank keeps a part of without a state."""
    frozen = configs.each(lambda setup: setup.trained_model.num_parameters - setup.trained_model.num_trained_parameters)
    return np.asarray(frozen * configs.layouts.dp_replicate / configs.layouts.num_ranks)
