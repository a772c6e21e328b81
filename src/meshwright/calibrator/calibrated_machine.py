"""Properties of the machine that calibration does not measure."""

import os
from datetime import UTC, datetime
from typing import Any

import torch

from meshwright.calibrator.describe import CalibratedMachine
from meshwright.hardware.catalogue import CALIBRATED, recognise_device
from meshwright.hardware.machine import num_usable_cores, processor_name, usable_memory_bytes
from meshwright.spec.machine.device import Device, Figure, Source
from meshwright.units import counted


def this_machine(device_type: str, num_ranks: int, name: str | None) -> CalibratedMachine:
    """Return this machine as `num_ranks` ranks on its CPU or its CUDA devices, with `name` or a default.

    A known accelerator keeps its datasheet figures next to the measured ones.
    """
    is_cuda = device_type == "cuda"
    hardware = torch.cuda.get_device_name() if is_cuda else processor_name()
    source = Source(
        title=f"meshwright calibrate: {num_ranks} ranks at once on {hardware}, torch {torch.__version__}",
        date=datetime.now(UTC).date().isoformat(),
        kind="measured",
    )
    device = _cuda_device(hardware, name, source) if is_cuda else _cpu_device(hardware, name, source, num_ranks)
    return CalibratedMachine(device, "NCCL" if is_cuda else "gloo", num_ranks, source)


def num_threads(num_ranks: int) -> int:
    """Return the CPU threads of each rank as in training: OMP_NUM_THREADS, or cores / ranks."""
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    return int(chosen) if chosen.isdigit() and int(chosen) else max(1, num_usable_cores() // num_ranks)


def _cpu_device(hardware: str, name: str | None, source: Source, num_ranks: int) -> Device:
    share = usable_memory_bytes() // num_ranks
    return Device(
        name=name or CALIBRATED,
        title=f"one of {num_ranks} ranks on {num_usable_cores()} cores of {hardware}, "
        f"{counted(num_threads(num_ranks), 'thread')} each",
        vendor="any",
        memory_bytes=Figure(value=float(share), source=source, note="this rank's share of the machine's memory"),
        is_host=True,
    )


def _cuda_device(hardware: str, name: str | None, source: Source) -> Device:
    properties = torch.cuda.get_device_properties(0)
    known = recognise_device(hardware)
    facts: dict[str, Any] = {
        "name": name or f"{known.name.removesuffix('-local') if known else 'cuda'}-local",
        "title": f"{hardware}, measured on this machine",
        "aliases": (hardware,),
        "memory_bytes": Figure(value=float(properties.total_memory), source=source),
        "num_sms": Figure(value=float(properties.multi_processor_count), source=source),
    }
    if known is not None:
        return known.replace(**facts, short_names=())
    return Device(**facts, vendor="amd" if torch.version.hip else "nvidia")
