"""op_seconds: how long a kernel of a traced operator takes.

    matmul      max(tile_flops / reached rate, bytes / memory rate) + start
    attention   FLOPs / (rate x ramp) of the operator's kernel, 2.5 x the FLOPs backward at a lower rate, + start
    the rest    bytes / memory rate + start
    by rows     attention without a kernel: products in float32 and passes over scores, matmul.py
    copies      bytes / PCIe + start, between the memories of the host and the device: host_memory.py
    managed     never less than the link to the host takes: managed_memory.py
    nothing     allocations and other looks at the same memory; collectives and messages, which links carry
    measured    matmuls and the attention that torch chooses, at the rate of their sizes, where `meshwright calibrate`
                timed the accelerator: as in measured_kernels.py, which formulas take
    on a host   as measured on the machine, with all that the host does besides: cost/host/host_ops.py

The same tiles, rates and constants as the planner's blocks (block_time.py), for the eager stack that Meshwright is:
here they price the very kernels that were traced, there what a model's formulas say of them. Ignored: L2 hits between
kernels, kernels that overlap, and the host, which only issues them.
"""

from collections.abc import Sequence

import numpy as np

from meshwright.cost.achieved_rates import (
    figure_of,
    is_blackwell,
    memory_share,
    num_sms,
    own_matmul_share,
    peak_flops_per_s,
    power_share,
)
from meshwright.cost.attention_rates import CHOSEN_KERNELS, kernel_rate
from meshwright.cost.compute.matmul import AttentionByRows, MatmulSizes, is_misaligned, tile_flops
from meshwright.cost.compute.op_shapes import (
    ATTENTION_BACKWARD_FLOPS,
    NARROW_HEAD,
    TF32,
    AttentionShape,
    MatmulShape,
    attention_shape,
    matmul_shape,
)
from meshwright.cost.compute.op_table import is_communication, is_free, moved_bytes
from meshwright.cost.constants import fitted_constants
from meshwright.cost.host.host_ops import HostOps
from meshwright.cost.layout_table import Floats
from meshwright.cost.memory.host_memory import copy_seconds
from meshwright.cost.memory.managed_memory import link_seconds
from meshwright.hardware.rates import attention_rates, matmul_rates
from meshwright.spec.machine.device import Device
from meshwright.spec.step.workload import BYTES_PER_ELEMENT
from meshwright.spec.trace.trace import Signature

_KERNELS = "eager"
"""What Meshwright's own stack is, as in Stack.kernels."""
_ELEMENT_BYTES = {**BYTES_PER_ELEMENT, TF32: BYTES_PER_ELEMENT["float32"], "float8": 1.0, "float4": 0.5}


def op_seconds(signatures: Sequence[Signature], device: Device) -> Floats:
    """Return the seconds of a kernel of each signature on `device` [signatures]; those of collectives are 0.

    Raises UnsupportedError where the catalogue lacks a rate that one of them needs.
    """
    price = HostOps(device) if device.is_host else _Pricer(device)
    return np.array([0.0 if is_communication(one) else price.seconds(one) for one in signatures], np.float64)


class _Pricer:
    """Prices operators on one accelerator."""

    def __init__(self, device: Device) -> None:
        self.device, self.constants = device, fitted_constants()
        self._memory = figure_of(device, "memory_bytes_per_s") * memory_share(device, self.constants)
        self._is_new = is_blackwell(device)
        # No vendor tuned this stack for the very run, but what was timed on this machine needs no factor:
        # stack_factors.py.
        slow = self.constants["plain_compute.blackwell" if self._is_new else "plain_compute"]
        self._slow, self._overhead = (1.0, 1.0) if device.matmul_points else (slow, self.constants["plain_overhead"])
        self._rates = {dtype: matmul_rates(device, dtype) for dtype in {point.dtype for point in device.matmul_points}}

    def seconds(self, signature: Signature) -> float:
        """Return the seconds of one kernel, or of the few that an operator is made of."""
        return max(self._device_s(signature), link_seconds(signature))

    def _device_s(self, signature: Signature) -> float:
        if is_free(signature) or signature.place == "host":
            return 0.0
        if signature.place != "device":
            return copy_seconds(signature) + self.constants["kernel_s"]
        if (matmul := matmul_shape(signature)) is not None:
            return self._slow * self._matmul_s(matmul, moved_bytes(signature))
        if (attention := attention_shape(signature)) is not None:
            return self._slow * (self._attention_s if attention.by_rows is None else self._by_rows_s)(attention)
        moved_s = moved_bytes(signature) / self._memory + self.constants["kernel_s"]
        return self._slow * self._overhead * moved_s

    def _matmul_s(self, shape: MatmulShape, num_bytes: float) -> float:
        constants, device = self.constants, self.device
        m, n, k, groups = (np.array(size, np.float64) for size in (shape.m, shape.n, shape.k, shape.groups))
        if (measured := self._rates.get(shape.dtype)) is not None and shape.groups == 1 and not shape.is_grouped:
            return max(float(2 * m * n * k / measured(m, n, k)), constants["kernel_s"])
        small_tile = constants["small_tile.blackwell"] if self._is_new else 1.0
        sizes = MatmulSizes(m, n, k, groups, shape.is_routed)
        tiles = float(tile_flops(sizes, np.array(num_sms(device)), small_tile))
        # A device without units for TF32 multiplies in full precision, whatever the program allows.
        is_ignored = shape.dtype == TF32 and device.peak_flops_per_s(TF32) is None
        dtype = "float32" if is_ignored else shape.dtype
        rate = peak_flops_per_s(device, dtype) * own_matmul_share(device, dtype, shape.precision, constants)
        rate *= power_share(device) ** constants["power_exponent"]
        element_bytes = np.array(_ELEMENT_BYTES[shape.dtype])
        rate /= constants["misaligned"] ** float(is_misaligned(n, k, element_bytes))
        rate /= constants["experts"] if shape.is_grouped else 1.0
        return float(max(tiles / rate, num_bytes / self._memory) + constants["kernel_s"] * shape.num_kernels)

    def _attention_s(self, shape: AttentionShape) -> float:
        constants = self.constants
        if (measured := self._measured_attention_rate(shape)) is not None:
            flops = (ATTENTION_BACKWARD_FLOPS if shape.is_backward else 1.0) * shape.flops
            return max(flops / measured, constants["kernel_s"])
        reached = kernel_rate(self.device, shape.kernel, _KERNELS, constants)
        rate = peak_flops_per_s(self.device, shape.dtype) * reached.share
        rate *= shape.context / (shape.context + constants["attention_ramp_tokens"])
        rate *= reached.narrow if shape.head_width < NARROW_HEAD else 1.0
        forward_s = shape.flops / rate
        if shape.is_backward:
            return ATTENTION_BACKWARD_FLOPS * forward_s / reached.backward + constants["kernel_s"]
        return forward_s + constants["kernel_s"]

    def _measured_attention_rate(self, shape: AttentionShape) -> float | None:
        """Return FLOP/s where the kernel that torch chooses by itself was timed; None for another.

        Its choice is traced as cuDNN's on any device (tracer/record/attention_kernels.py).
        """
        if shape.kernel not in CHOSEN_KERNELS:
            return None
        rate = attention_rates(self.device, shape.dtype)[shape.is_backward]
        return None if rate is None else float(rate(max(2 * shape.context, 1), max(shape.head_width, 1)))

    def _by_rows_s(self, shape: AttentionShape) -> float:
        assert shape.by_rows is not None
        constants, device = self.constants, self.device
        rows = AttentionByRows(*(np.array(size, np.float64) for size in (*shape.by_rows, shape.head_width)))
        rate = peak_flops_per_s(device, shape.dtype) * own_matmul_share(device, shape.dtype, "", constants)
        rate *= power_share(device) ** constants["power_exponent"]
        small_tile = constants["small_tile.blackwell"] if self._is_new else 1.0
        memory = np.array(self._memory)
        products = rows.products_s(np.array(rate), memory, np.array(num_sms(device)), small_tile)
        passes = rows.passes_s(memory, constants["kernel_s"])
        return float(products[shape.is_backward] + self._overhead * passes[shape.is_backward])
