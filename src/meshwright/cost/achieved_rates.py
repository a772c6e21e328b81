"""Rates: what a setup's device and links reach, from the catalogue's figures and the constants.

    matmul      dense peak x share of its architecture [x (power cap / full power) ^ exponent]
    memory      bandwidth x share

The share of a matmul is fitted on published runs, but for our own stack's 16-bit matmuls on architectures where its
kernels were timed in training (matmul_own.ARCH): those take no factor for what no vendor tuned (stack_factors.py).
Attention's rates: attention_rates.py. A measured figure of the catalogue (`meshwright calibrate`) replaces
peak x share. An unknown architecture that was not measured is an error.
"""

from dataclasses import dataclass

import numpy as np

from meshwright.cost.constants import Constants, all_constants, fixed_constant
from meshwright.cost.layout_table import Floats
from meshwright.cost.training_setup import TrainingSetup
from meshwright.errors import UnsupportedError
from meshwright.spec.machine.device import Device

_FLOAT32_SHARE = fixed_constant("float32_share")
_MEASURED_ARCHITECTURE = "ampere"
"""Whose shares fill in what calibration of a device without architecture did not time."""


def architecture_of(device: Device) -> str:
    """Return the device's architecture; raises UnsupportedError for one that no constants are known for."""
    if device.architecture is None and device.matmul_points:
        return _MEASURED_ARCHITECTURE
    if f"matmul.{device.architecture}" not in all_constants():
        known = [name.removeprefix("matmul.") for name in all_constants() if name.startswith("matmul.")]
        raise UnsupportedError(
            f"device {device.name}: architecture = {device.architecture!r} has no constants in the cost model: set it "
            f"to one of {', '.join(known)} in its catalogue entry, or measure the device with `meshwright calibrate`"
        )
    assert device.architecture is not None
    return device.architecture


def is_blackwell(device: Device) -> bool:
    """Return whether the device is of the newest architecture, whose libraries are young."""
    return architecture_of(device).startswith("blackwell")


@dataclass(frozen=True)
class Peaks:
    """Datasheet figures, one element a setup; independent of the constants."""

    dense: Floats
    """Dense peak of the workload's matmuls, FLOP/s: what MFU is a share of."""
    dense16: Floats
    dense32: Floats
    memory_bytes_per_s: Floats
    num_sms: Floats
    power_share: Floats
    """Power cap over the power that the peaks are given for."""


def peaks_of(setups: tuple[TrainingSetup, ...]) -> Peaks:
    """Return the figures of each setup's device; raises UnsupportedError naming a figure that is missing."""
    columns = [
        (
            peak_flops_per_s(setup.cluster.device, setup.workload.matmul_dtype),
            peak_flops_per_s(setup.cluster.device, setup.workload.activation_dtype),
            _float32_peak(setup),
            figure_of(setup.cluster.device, "memory_bytes_per_s"),
            num_sms(setup.cluster.device),
            power_share(setup.cluster.device),
        )
        for setup in setups
    ]
    return Peaks(*np.array(columns, np.float64).T)


def _float32_peak(setup: TrainingSetup) -> float:
    """Return the dense peak of float32 matmuls, FLOP/s, of which only routers have some."""
    device = setup.cluster.device
    given = device.peak_flops_per_s("float32")
    return given or _FLOAT32_SHARE * peak_flops_per_s(device, setup.workload.activation_dtype)


def peak_flops_per_s(device: Device, dtype: str) -> float:
    """Return the dense peak of matmuls of `dtype`; raises UnsupportedError where the catalogue has none."""
    peak = device.peak_flops_per_s(dtype)
    if peak is None and dtype == "float16":
        peak = device.peak_flops_per_s("bfloat16")
    if peak is None and device.matmul_points and (best := device.measured_matmul_flops_per_s.of(dtype)):
        return best.value
    if peak is None:
        raise UnsupportedError(f"device {device.name} has no dense_flops_per_s.{dtype}: add it to its catalogue entry")
    return peak


def figure_of(device: Device, name: str) -> float:
    """Return the device's figure of that name; raises UnsupportedError where the catalogue has none."""
    figure = getattr(device, name)
    if figure is None:
        raise UnsupportedError(f"device {device.name} has no {name}: add it to its catalogue entry")
    return float(figure.value)


def num_sms(device: Device) -> float:
    """Return what tiles are spread over: one on a host, whose matmuls are measured by size."""
    return 1.0 if device.is_host and device.matmul_points else figure_of(device, "num_sms")


def power_share(device: Device) -> float:
    """Return the power cap over the power that the device's peaks are given for."""
    if device.power_w is None or device.peak_power_w is None:
        return 1.0
    return device.power_w.value / device.peak_power_w.value


@dataclass(frozen=True)
class Rates:
    """What is reached, one element a setup."""

    matmul: Floats
    matmul16: Floats
    matmul32: Floats
    memory: Floats


def rates_of(setups: tuple[TrainingSetup, ...], peaks: Peaks, constants: Constants) -> Rates:
    """Return the rates that each setup's device reaches, FLOP/s and bytes/s."""
    power = peaks.power_share ** constants["power_exponent"]
    shares = np.array([_shares(setup, constants) for setup in setups], np.float64).T
    return Rates(
        matmul=peaks.dense * shares[0] * power,
        matmul16=peaks.dense16 * shares[1] * power,
        matmul32=peaks.dense32 * shares[2] * power,
        memory=peaks.memory_bytes_per_s * [memory_share(setup.cluster.device, constants) for setup in setups],
    )


def _shares(setup: TrainingSetup, constants: Constants) -> tuple[float, float, float]:
    """Return the shares of the workload's matmuls, of 16-bit ones, and of those in float32."""
    device, workload = setup.cluster.device, setup.workload
    share_of = own_matmul_share if setup.is_own else matmul_share
    share16 = share_of(device, workload.activation_dtype, "", constants)
    share32 = matmul_share(device, "float32", "", constants)
    return share_of(device, workload.matmul_dtype, workload.precision, constants), share16, share32


def own_matmul_share(device: Device, dtype: str, precision: str, constants: Constants) -> float:
    """Return what `matmul_share` returns, of our own stack, whose times plain_compute multiplies."""
    measured = constants.get(f"matmul_own.{device.architecture}")
    if measured is None or dtype not in ("bfloat16", "float16") or _best_measured(device, dtype) is not None:
        return matmul_share(device, dtype, precision, constants)
    return measured * constants["plain_compute"]


def _best_measured(device: Device, dtype: str) -> float | None:
    """Return the best rate of an accelerator's matmuls that this machine was calibrated with, FLOP/s."""
    rates = (point.flops_per_s.value for point in device.matmul_points if point.dtype == dtype)
    return max(rates, default=None) if _has_measured_rates(device) else None


def _has_measured_rates(device: Device) -> bool:
    """Return whether an accelerator was calibrated; what a host was measured to do replaces seconds, not rates."""
    return bool(device.matmul_points) and not device.is_host


def matmul_share(device: Device, dtype: str, precision: str, constants: Constants) -> float:
    """Return the share of the dense peak that large matmuls of `dtype` reach; `precision` as in Workload.precision.

    Of an accelerator that was measured it is its best one, power cap included.
    """
    if (best := _best_measured(device, dtype)) is not None:
        return float(best / peak_flops_per_s(device, dtype) / power_share(device) ** constants["power_exponent"])
    if dtype == "float8":
        share = share_of_peak("matmul8", device, constants)
        share *= constants["rowwise"] if precision.startswith("float8-rowwise") else 1.0
        return share * (constants["mx"] if precision == "mxfp8" else 1.0)
    return share_of_peak("matmul4" if dtype == "float4" else "matmul", device, constants)


def memory_share(device: Device, constants: Constants) -> float:
    """Return the share of its memory's bandwidth that kernels reach: of an accelerator that was measured, its own."""
    measured = device.measured_memory_bytes_per_s
    if measured is None or not _has_measured_rates(device):
        return constants["memory_rate"]
    return float(measured.value / figure_of(device, "memory_bytes_per_s"))


def share_of_peak(kind: str, device: Device, constants: Constants) -> float:
    """Return the constant `kind` of the device's architecture; raises UnsupportedError where there is none."""
    architecture = architecture_of(device)
    name = f"{kind}.{architecture}"
    if name in constants:
        return constants[name]
    if device.matmul_points:
        return constants[f"matmul.{architecture}"]
    raise UnsupportedError(
        f"device {device.name}: the cost model has no constant {name}: choose another precision, or measure the device "
        "with `meshwright calibrate`"
    )
