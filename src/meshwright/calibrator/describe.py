"""Measurements as a Device and a Cluster of the catalogue."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.calibrator.collective_lines import collective_lines
from meshwright.calibrator.core_share import relative_error_of
from meshwright.calibrator.measure import Measurements
from meshwright.calibrator.op_lines import exchange_line, fitted_lines
from meshwright.calibrator.profiled_step import OpSample, ProfiledStep
from meshwright.calibrator.timing import SizeGrid
from meshwright.hardware import quantity
from meshwright.spec.machine.cluster import Cluster, Link
from meshwright.spec.machine.device import (
    AttentionPoint,
    CollectivePoint,
    Device,
    Figure,
    MatmulPoint,
    MatmulRates,
    MemoryOpPoint,
    OpLine,
    Source,
)

# Fused AdamW reads parameter, gradient and both moments, and writes all but the gradient, in float32.
_UPDATE_BYTES_PER_PARAMETER = 28


@dataclass(frozen=True)
class CalibratedMachine:
    """Properties of the machine that are not measured."""

    device: Device
    """Name and memory of the device, and the datasheet of a known accelerator."""
    backend: str
    """Backend of collectives: gloo or NCCL."""
    num_ranks: int
    source: Source
    """The measurement."""

    def figure(self, value: float, units: Mapping[str, float]) -> Figure:
        """Return a measured value, rounded to significant digits."""
        return Figure(value=quantity.round_quantity(value, units), source=self.source)


def describe(
    machine: CalibratedMachine, sizes: SizeGrid, measured: Measurements, steps: Sequence[ProfiledStep] = ()
) -> tuple[Device, Cluster]:
    """Return the device of one rank while all ranks work, and the cluster of all ranks.

    `steps` are profiled training steps, if any. Raises MeshwrightError where no rate of a collective can be read.
    """
    device = machine.device.replace(
        measured_memory_bytes_per_s=_memory_rate(machine, measured),
        measured_matmul_flops_per_s=_best_matmuls(machine, measured),
        host_launch_s=machine.figure(measured.host_s["kernel"], quantity.SECONDS),
        calibration_error=_calibration_error(machine, measured),
        matmul_points=_matmul_points(machine, measured),
        attention_points=_attention_points(machine, sizes, measured),
        memory_op_points=_memory_op_points(machine, measured),
        op_lines=_op_lines(machine, [op for step in steps for op in step.ops]),
    )
    if device.memory_bytes_per_s is None:
        device = device.replace(memory_bytes_per_s=device.measured_memory_bytes_per_s)
    cluster = Cluster(
        name=device.name,
        title=f"{device.title}: {machine.num_ranks} ranks over {machine.backend}",
        device=device,
        num_devices=machine.num_ranks,
        devices_per_node=machine.num_ranks,
        is_usual=True,
        intra_node=_link(machine, measured, steps) if machine.num_ranks > 1 else None,
        source=machine.source,
    )
    return device, cluster


def _calibration_error(machine: CalibratedMachine, measured: Measurements) -> Figure | None:
    error = relative_error_of(measured.core_share.get("core", 1.0))
    return None if error is None else machine.figure(error, quantity.SHARE)


def _matmul_flops(rows: int, columns: int, inner: int) -> float:
    """Return the FLOPs of the three matmuls that are timed together."""
    return 6.0 * rows * columns * inner


def _best_matmuls(machine: CalibratedMachine, measured: Measurements) -> MatmulRates:
    rates: dict[str, Any] = {}
    for (dtype, *sizes), took_s in measured.matmul_s.items():
        rates[dtype] = max(rates.get(dtype, 0.0), _matmul_flops(*sizes) / took_s)
    return MatmulRates(**{dtype: machine.figure(rate, quantity.FLOPS_PER_S) for dtype, rate in rates.items()})


def _memory_rate(machine: CalibratedMachine, measured: Measurements) -> Figure:
    num_parameters = max(elements for op, _, elements in measured.forward_memory_op_s if op == "update")
    took_s = measured.forward_memory_op_s["update", "float32", num_parameters]
    return machine.figure(_UPDATE_BYTES_PER_PARAMETER * num_parameters / took_s, quantity.BYTES_PER_S)


def _matmul_points(machine: CalibratedMachine, measured: Measurements) -> tuple[MatmulPoint, ...]:
    return tuple(
        MatmulPoint(
            dtype=dtype,
            num_rows=rows,
            num_columns=columns,
            inner=inner,
            flops_per_s=machine.figure(_matmul_flops(rows, columns, inner) / took_s, quantity.FLOPS_PER_S),
        )
        for (dtype, rows, columns, inner), took_s in measured.matmul_s.items()
    )


def _attention_points(
    machine: CalibratedMachine, sizes: SizeGrid, measured: Measurements
) -> tuple[AttentionPoint, ...]:
    points = []
    for at, took_s in measured.forward_attention_s.items():
        dtype, seq_len, head_dim = at
        flops = 2.0 * sizes.num_heads * seq_len**2 * head_dim
        backward = 2.5 * flops / measured.backward_attention_s[at]
        points.append(
            AttentionPoint(
                dtype=dtype,
                num_heads=sizes.num_heads,
                seq_len=seq_len,
                head_dim=head_dim,
                forward_flops_per_s=machine.figure(flops / took_s, quantity.FLOPS_PER_S),
                backward_flops_per_s=machine.figure(backward, quantity.FLOPS_PER_S),
            )
        )
    return tuple(points)


def _memory_op_points(machine: CalibratedMachine, measured: Measurements) -> tuple[MemoryOpPoint, ...]:
    def rate(elements: int, took_s: float | None) -> Figure | None:
        return None if took_s is None else machine.figure(elements / took_s, quantity.ELEMENTS_PER_S)

    points = []
    for at, took_s in measured.forward_memory_op_s.items():
        op, dtype, elements = at
        forward, backward = rate(elements, took_s), rate(elements, measured.backward_memory_op_s.get(at))
        assert forward is not None
        points.append(
            MemoryOpPoint(
                op=op,
                dtype=dtype,
                num_elements=elements,
                forward_elements_per_s=forward,
                backward_elements_per_s=backward,
            )
        )
    return tuple(points)


def _op_lines(machine: CalibratedMachine, samples: Sequence[OpSample]) -> tuple[OpLine, ...]:
    def rate(s_per_one: float, units: Mapping[str, float]) -> Figure | None:
        return machine.figure(1 / s_per_one, units) if s_per_one > 0 else None

    return tuple(
        OpLine(
            op=op,
            dtype=dtype,
            start_s=machine.figure(start_s, quantity.SECONDS),
            bytes_per_s=rate(s_per_byte, quantity.BYTES_PER_S),
            flops_per_s=rate(s_per_flop, quantity.FLOPS_PER_S),
        )
        for (op, dtype), (start_s, s_per_byte, s_per_flop) in sorted(fitted_lines(samples).items())
    )


def _link(machine: CalibratedMachine, measured: Measurements, steps: Sequence[ProfiledStep]) -> Link:
    """Return the link between ranks: a line per collective, and ring-step bandwidth and latency from all-gathers."""
    memory = _memory_rate(machine, measured).value
    lines = dict(collective_lines(measured, memory).by_group)
    if steps:
        lines["exchange", machine.num_ranks] = exchange_line(steps)
    num_steps = machine.num_ranks - 1
    latency_s, s_per_byte = lines["all-gather", machine.num_ranks]
    return Link(
        name=f"{machine.backend} on one machine",
        bytes_per_s=machine.figure(num_steps / machine.num_ranks / s_per_byte, quantity.BYTES_PER_S),
        latency_s=machine.figure(latency_s / num_steps, quantity.SECONDS),
        collectives=tuple(
            CollectivePoint(
                kind=kind,
                num_ranks=num_ranks,
                latency_s=machine.figure(latency_s, quantity.SECONDS),
                bytes_per_s=machine.figure(1 / s_per_byte, quantity.BYTES_PER_S),
            )
            for (kind, num_ranks), (latency_s, s_per_byte) in lines.items()
        ),
    )


def unread_rates(machine: CalibratedMachine, measured: Measurements) -> tuple[str, ...]:
    """Return a sentence for each collective of which noise left no rate to read; raises as `describe` does."""
    if machine.num_ranks == 1:
        return ()
    return collective_lines(measured, _memory_rate(machine, measured).value).notes
