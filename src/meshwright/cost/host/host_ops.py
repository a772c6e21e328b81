"""HostOps: what a traced operator costs where kernels run on the host's own cores, as measured on that machine.

    seconds = start + bytes / bytes rate + FLOPs / FLOP rate        a line for each operator and format

Lines come from profiled steps of training (meshwright calibrate) and hold what the host does before the operator, too.
A matmul that was not met (with a bias, batched) takes mm's line; a grouped one that a loop computes is one for each
group. Another operator that was not met takes the median start and the median rate of those that were; one that
computes other FLOPs is refused. What only allocates moves no bytes. Ignored: caches, which make a small tensor faster
than the line, a large one slower.
"""

import statistics

from meshwright.cost.compute.op_shapes import matmul_shape, op_flops
from meshwright.cost.compute.op_table import is_free, op_name
from meshwright.errors import UnsupportedError
from meshwright.spec.machine.device import Device, OpLine
from meshwright.spec.trace.trace import Signature

_MATMUL = "aten.mm.default"


class HostOps:
    """Prices operators on one machine."""

    def __init__(self, device: Device) -> None:
        if not device.op_lines:
            raise UnsupportedError(
                f"device {device.name} has no op_lines, the seconds of operators on this machine: "
                "run `meshwright calibrate`, which measures them"
            )
        self.device = device
        self._lines = {(line.op, line.dtype): line for line in device.op_lines}
        self._start_s = statistics.median(line.start_s.value for line in device.op_lines)
        rates = [line.bytes_per_s.value for line in device.op_lines if line.bytes_per_s is not None]
        self._s_per_byte = 1 / statistics.median(rates) if rates else 0.0

    def seconds(self, signature: Signature) -> float:
        """Return the seconds of one operator; raises UnsupportedError for FLOPs whose rate was not measured."""
        moved = 0 if is_free(signature) else signature.read_bytes + signature.written_bytes
        num_bytes, flops = float(moved), op_flops(signature)
        num_kernels, op, dtype = 1.0, signature.op, dtype_of(signature)
        matmul = matmul_shape(signature)
        # The jobs that `calibrate` profiles have no biases and no experts.
        if matmul is not None and (matmul.is_grouped or (op, dtype) not in self._lines):
            num_kernels, op = matmul.num_kernels, _MATMUL
        line = self._lines.get((op, dtype))
        if line is not None:
            return _on_line(line, num_kernels, num_bytes, flops)
        if flops > 0:
            raise UnsupportedError(
                f"{op_name(signature.op).name} of {dtype} was not measured on device {self.device.name}: "
                "trace for the device `cpu`, in a format that `meshwright calibrate` measured "
                f"({', '.join(sorted({line.dtype for line in self.device.op_lines if line.flops_per_s}))})"
            )
        return self._start_s + num_bytes * self._s_per_byte


def dtype_of(signature: Signature) -> str:
    """Return the format of its first tensor."""
    shapes = (*signature.inputs, *signature.outputs)
    return shapes[0].dtype if shapes else ""


def _on_line(line: OpLine, num_kernels: float, num_bytes: float, flops: float) -> float:
    seconds = num_kernels * line.start_s.value
    seconds += 0.0 if line.bytes_per_s is None else num_bytes / line.bytes_per_s.value
    return seconds + (0.0 if line.flops_per_s is None else flops / line.flops_per_s.value)
