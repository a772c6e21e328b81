"""Seconds of copies between the memories of host and device, and of the operators that run on the host.

    copy        bytes / PCIe, of one direction
    operator    bytes / the rank's share of the host's memory bandwidth

Figures are those of a usual server, which no catalogue entry states (constants.toml). Ignored: devices that share a
PCIe switch, and caches of the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.compute.op_bytes import is_free, moved_bytes
from meshwright.cost.constants import fixed_constant
from meshwright.spec.trace.trace import Signature

PCIE_BYTES_PER_S = fixed_constant("pcie_share") * fixed_constant("pcie_bytes_per_s")
HOST_BYTES_PER_S = fixed_constant("host_bytes_per_s")
HOST_BYTES = fixed_constant("host_bytes")


def copy_seconds(signature: Signature) -> float:
    """Return the seconds of a copy between the memories of the host and the device."""
    return _copied_bytes(signature) / PCIE_BYTES_PER_S


def host_seconds(signatures: Sequence[Signature], devices_per_node: int) -> NDArray[np.float64]:
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
