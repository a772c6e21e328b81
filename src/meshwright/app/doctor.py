"""doctor: what this machine has, what is missing and the command that gets it."""

import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from rich.console import RenderableType
from rich.text import Text

from meshwright.app.results.result import Result
from meshwright.errors import MeshwrightError
from meshwright.extras import EXTRA_OF_PACKAGE
from meshwright.hardware import machine
from meshwright.hardware.catalogue import recognise_device, user_folder
from meshwright.hardware.machine import nvidia_driver
from meshwright.memory.capabilities import extended_gpu_memory, managed_memory, nccl_allocator
from meshwright.spec.machine.allocator_settings import allocator_notes, has_expandable_segments, variable_of
from meshwright.units import format_bytes, format_count

TORCH_SERIES = ((2, 11), (2, 15))
"""Oldest and newest supported series of torch; pyproject.toml says the same to pip."""

_TORCH_REQUIREMENT = "torch>=2.11,<2.16"
_SMALL_SHARED_MEMORY_BYTES = 2**30
_FEW_OPEN_FILES = 1024


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    group: str
    what: str
    found: str
    state: Literal["ok", "missing", "broken"] = "ok"
    remedy: str | None = None
    """The command that fixes it."""


_STYLES = {"ok": "", "missing": "yellow", "broken": "bold red"}


@dataclass(frozen=True, repr=False)
class Checkup(Result):
    """What was found on this machine. Data frame: a row for each finding."""

    findings: tuple[Finding, ...]

    @property
    def is_broken(self) -> bool:
        """Return whether something that training needs is installed but does not work."""
        return any(finding.state == "broken" for finding in self.findings)

    @property
    def can_train(self) -> bool:
        """Return whether training can run here."""
        return not self.is_broken and _installed("torch") is not None

    def to_dict(self) -> dict[str, Any]:
        """Return what `meshwright doctor --json` prints."""
        return {"can_train": self.can_train, "findings": self._rows()}

    def _summary(self) -> str:
        return f"Checkup: {self._verdict()}"

    def _verdict(self) -> str:
        return "Training can run here." if self.can_train else "Training cannot run here yet."

    def _page(self) -> Iterator[RenderableType]:
        for group in dict.fromkeys(finding.group for finding in self.findings):
            yield Text(group, "bold")
            width = max(15, *(len(finding.what) + 2 for finding in self.findings if finding.group == group))
            for finding in self.findings:
                if finding.group == group:
                    yield Text(f"  {finding.what:<{width}}{finding.found}", _STYLES[finding.state])
        remedies = {finding.remedy: finding.state for finding in self.findings if finding.remedy is not None}
        if remedies:
            yield Text("to get what is missing", "bold")
        for remedy, state in remedies.items():
            names = ", ".join(finding.what for finding in self.findings if finding.remedy == remedy)
            yield Text(f"  {names}:\n    {remedy}", _STYLES[state])
        yield Text(self._verdict(), "bold")

    def _rows(self) -> list[dict[str, Any]]:
        return [asdict(finding) for finding in self.findings]


def doctor() -> Checkup:
    """Return what this machine has, what is missing and how to get it."""
    return Checkup((*_machine(), *_torch(), *_device_memory(), *_packages()))


def _missing_if(is_missing: bool, finding: Finding, remedy: str) -> Finding:
    return replace(finding, state="missing", remedy=remedy) if is_missing else finding


def _machine() -> Iterator[Finding]:
    group = "machine"
    yield Finding(group, "system", machine.operating_system())
    yield Finding(group, "Python", f"{'.'.join(map(str, sys.version_info[:3]))} ({sys.executable})")
    yield Finding(group, "cores", f"{machine.num_usable_cores()} usable")
    yield Finding(group, "memory", format_bytes(machine.usable_memory_bytes()))
    shared = machine.shared_memory_bytes()
    if shared is not None:
        found = f"{format_bytes(shared[0])}, {format_bytes(shared[1])} free (/dev/shm)"
        remedy = "docker run --shm-size=8g ...   (NCCL needs it between GPUs of one machine)"
        yield _missing_if(shared[0] < _SMALL_SHARED_MEMORY_BYTES, Finding(group, "shared memory", found), remedy)
    yield Finding(group, "free disk", f"{format_bytes(machine.free_disk_bytes(Path.cwd()))} (working directory)")
    limit = machine.max_open_files()
    if limit is not None:
        yield _missing_if(limit < _FEW_OPEN_FILES, Finding(group, "open files", f"at most {limit}"), "ulimit -n 65536")
    compiler = machine.cpp_compiler()
    remedy = f"{machine.compiler_install_command()}   (for layout.compile = true)"
    yield _missing_if(compiler is None, Finding(group, "C++ compiler", compiler or "none"), remedy)
    yield Finding(group, "NVIDIA driver", machine.nvidia_driver() or "none")


def _torch() -> Iterator[Finding]:
    group, installed = "torch", _installed("torch")
    if installed is None:
        remedy = "pip install '.[train]'"
        yield Finding(group, "torch", "not installed: this is the light install, which plans", "missing", remedy)
        return
    oldest, newest = TORCH_SERIES
    if not oldest <= _series(installed) <= newest:
        supported = f"{oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}"
        found = f"{installed}, and Meshwright runs on {supported}"
        yield Finding(group, "torch", found, "broken", f"pip install '{_TORCH_REQUIREMENT}'")
        return
    try:
        import torch
    except (ImportError, OSError) as error:
        remedy = f"pip install --force-reinstall '{_TORCH_REQUIREMENT}'"
        yield Finding(group, "torch", f"{installed}, cannot be imported: {error}", "broken", remedy)
        return
    yield from _torch_build(torch, installed)
    yield from _torch_devices(torch)


def _torch_build(torch: Any, installed: str) -> Iterator[Finding]:
    group = "torch"
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "ROCm" if torch.version.hip else "CPU"
    if build == "CPU" and nvidia_driver():
        remedy = "reinstall torch with its CUDA build: https://pytorch.org/get-started/locally"
        yield Finding(group, "torch", f"{installed}, CPU build next to an NVIDIA driver", "missing", remedy)
    else:
        yield Finding(group, "torch", f"{installed}, {build} build")
    # Imported here: it needs torch.
    from meshwright.trainer.launch.host_process import takes_onednn

    if takes_onednn():
        yield Finding(group, "matmuls", "float32 by oneDNN, faster than MKL on AMD's; batched ones by MKL")
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_gloo_available():
        yield Finding(group, "gloo", "available (ranks on processors)")
    else:
        remedy = f"pip install --force-reinstall '{_TORCH_REQUIREMENT}'"
        yield Finding(group, "gloo", "not in this build of torch", "broken", remedy)
    if torch.cuda.is_available() and distributed.is_nccl_available():
        yield Finding(group, "NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    elif torch.cuda.is_available():
        remedy = f"pip install --force-reinstall '{_TORCH_REQUIREMENT}'"
        yield Finding(group, "NCCL", "not in this build of torch: ranks on GPUs need it", "broken", remedy)


def _torch_devices(torch: Any) -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding("torch", "devices", "the processor only")
        return
    yield from _pools(torch)
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found = f"{properties.name}, {format_bytes(properties.total_memory)}"
        device = recognise_device(properties.name)
        peak = None if device is None else device.peak_flops_per_s("bfloat16")
        if device is None:
            remedy = f"describe it in {user_folder()}/devices/NAME.toml, or set cluster.device in the job"
            yield Finding("torch", f"cuda:{index}", f"{found}: unknown, so MFU stays empty", "missing", remedy)
        else:
            rate = "no bfloat16 peak known" if peak is None else f"{format_count(peak)}FLOP/s bfloat16"
            yield Finding("torch", f"cuda:{index}", f"{found}: {device.name}, {rate}")


def _device_memory() -> Iterator[Finding]:
    """Yield what torch's settings of CUDA memory are and do, also where there is no CUDA device."""
    group, name = "memory of CUDA devices", variable_of(os.environ)
    for label, text in allocator_notes(os.environ):
        yield Finding(group, label, text)
    if not (name is None or has_expandable_segments(os.environ)):
        found = f"{name} has no expandable_segments:True, which would leave more of the device to tensors"
        yield Finding(group, "advice", found, "missing", f"unset {name}")


def _pools(torch: Any) -> Iterator[Finding]:
    """Yield which memory pools of [memory] the first device has, each with the reason."""
    is_rocm = torch.version.hip is not None
    try:
        found = (
            managed_memory(0, is_rocm=is_rocm),
            nccl_allocator(0, is_rocm=is_rocm, has_nccl=torch.distributed.is_nccl_available()),
            extended_gpu_memory(0, is_rocm=is_rocm),
        )
    except MeshwrightError as error:
        yield Finding("torch", "memory pools", f"unknown: {error}")
        return
    for one in found:
        yield Finding("torch", "memory pools", f"{one.name}: {'yes' if one.is_available else 'no'}: {one.why}")


def _packages() -> Iterator[Finding]:
    for package, extra in EXTRA_OF_PACKAGE.items():
        if package == "torch":
            continue  # has a group of its own
        installed = _installed(package)
        finding = Finding("packages", package, installed or "not installed")
        yield _missing_if(installed is None, finding, f"pip install '.[{extra}]'")


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _series(installed: str) -> tuple[int, int]:
    major, minor = installed.split(".")[:2]
    return int(major), int(minor)
