"""Whether the peak FLOP/s of a precision on a device is known, and which precisions to choose from if not."""

from __future__ import annotations

from typing import get_args

from meshwright.spec.job.sections import DType
from meshwright.spec.machine.device import Device, MatmulRates
from meshwright.spec.step.workload import MATMUL_DTYPE, Precision


def dense_peak(device: Device, dtype: str) -> float | None:
    """Return the dense peak of matmuls in `dtype` on the device, FLOP/s; None where it is unknown."""
    if dtype == "float16":  # devices multiply both 16-bit formats at one rate
        return device.peak_flops_per_s(dtype) or device.peak_flops_per_s("bfloat16")
    return None if dtype == "float64" else device.peak_flops_per_s(dtype)


def rate_problem(device: Device, precision: Precision, *, is_option: bool = False) -> str | None:
    """Return why a step in `precision` cannot be priced on the device, None where it can.

    `is_option` says that --precision asks for it, which takes more formats than a job's precision.compute.
    """
    known = _known(device)
    if _has_rate(device, precision):
        return None
    if not known:
        return (
            f"device {device.name} has no matmul rate at all in the catalogue: `meshwright calibrate` measures this "
            "machine's, or name another cluster"
        )
    dtype = MATMUL_DTYPE[precision]
    asked = f"--precision {precision}" if is_option else f'precision.compute = "{precision}"'
    return (
        f"device {device.name} has no {dtype} matmul rate in the catalogue (it has {', '.join(known)}), which {asked} "
        f"needs: {_advice(device, is_option)}add dense_flops_per_s.{dtype} to its entry"
    )


def _advice(device: Device, is_option: bool) -> str:
    """Return the precisions that the same key or option takes instead, as the start of a sentence."""
    priced = [name for name in get_args(Precision) if _has_rate(device, name)]
    if is_option:
        return f"give --precision {' or '.join(priced)}, or " if priced else ""
    of_jobs = [name for name in priced if name in get_args(DType)]
    others = [name for name in priced if name not in of_jobs]
    set_to = " or ".join(f'"{name}"' for name in of_jobs)
    ways = [f"set precision.compute to {set_to}"] if of_jobs else []
    ways += [f"plan for other software with --precision {' or '.join(others)}"] if others else []
    return "".join(f"{way}, or " for way in ways)


def _has_rate(device: Device, precision: Precision) -> bool:
    dtype = MATMUL_DTYPE[precision]
    return dtype in _known(device) or dense_peak(device, dtype) is not None


def _known(device: Device) -> list[str]:
    """Return the dtypes whose matmul rate is in the catalogue or was measured."""
    rates = device.dense_flops_per_s, device.measured_matmul_flops_per_s
    return [name for name in MatmulRates.model_fields if any(getattr(rate, name) for rate in rates)]
