"""calibrate: measures this machine as a device and a cluster of the user's own catalogue; needs torch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import RenderableType

from meshwright.app.cuda import require_cuda
from meshwright.app.progress import elapsed
from meshwright.app.results.result import Result
from meshwright.calibrator.calibrated_machine import num_threads, this_machine
from meshwright.calibrator.describe import CalibratedMachine, describe, unread_rates
from meshwright.calibrator.measure import Measurements, mean_of, measure, slow_dtypes
from meshwright.calibrator.profiled_step import ProfiledStep, profiled_steps
from meshwright.calibrator.step_jobs import step_jobs, whole_jobs, without_hooks
from meshwright.calibrator.timing import CPU_SIZES, CUDA_SIZES
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.hardware.catalogue import user_folder
from meshwright.hardware.entry import cluster_toml, device_toml
from meshwright.hardware.machine import num_usable_cores
from meshwright.hardware.quantity import BYTES_PER_S, FLOPS_PER_S, SECONDS, SHARE, format_quantity
from meshwright.log import logger
from meshwright.pages.tables.page_table import PageTable
from meshwright.spec.machine.cluster import Cluster
from meshwright.spec.machine.device import Device
from meshwright.trainer.launch.local.local_ranks import RanksFailed, run_ranks
from meshwright.trainer.step.step_builder import TRAINER_STEP
from meshwright.units import counted

Measured = TypeVar("Measured")
_FIRST_LINE = "# Written by `meshwright calibrate`, which replaces it when it runs again.\n"
# Every size is measured at least once a round, however little time is given, and next to other work it takes longer.
_PATIENCE, _LEAST_S = 10, 600


@dataclass(frozen=True, repr=False)
class CalibrationResult(Result):
    """What was measured of this machine, and the files that were written. Data frame: a row for each rate."""

    device: Device
    cluster: Cluster
    files: tuple[Path, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return what `meshwright calibrate --json` prints."""
        files = [str(file) for file in self.files]
        return {"device": self.device.to_dict(), "cluster": self.cluster.to_dict(), "files": files}

    def _summary(self) -> str:
        return f"CalibrationResult {self.device.title}; each of {self.cluster.num_devices} ranks, all busy"

    def _page(self) -> Iterator[RenderableType]:
        yield f"{self.device.title}; each of {self.cluster.num_devices} ranks, all busy:"
        table = PageTable("rate", "measured")
        for row in self._rows():
            table.add_row(row["rate"], row["measured"])
        yield table
        for file in self.files:
            yield f"wrote {file}"
        yield f"next: meshwright plan JOB --cluster {self.cluster.name}:{self.cluster.num_devices}"

    def _rows(self) -> list[dict[str, Any]]:
        device = self.device
        assert device.measured_memory_bytes_per_s is not None
        assert device.host_launch_s is not None
        rates = {
            f"matmul, {dtype}, at best": format_quantity(rate.value, FLOPS_PER_S)
            for dtype, rate in device.measured_matmul_flops_per_s
            if rate is not None
        }
        rates["memory"] = format_quantity(device.measured_memory_bytes_per_s.value, BYTES_PER_S)
        rates["host, for each kernel"] = format_quantity(device.host_launch_s.value, SECONDS)
        if device.calibration_error is not None:
            rates["taken by other programs"] = format_quantity(device.calibration_error.value, SHARE)
        for point in self.cluster.intra_node.collectives if self.cluster.intra_node else ():
            latency = format_quantity(point.latency_s.value, SECONDS)
            rate = format_quantity(point.bytes_per_s.value, BYTES_PER_S)
            rates[f"{point.kind} of {point.num_ranks}"] = f"{latency}, then {rate}"
        return [{"rate": name, "measured": measured} for name, measured in rates.items()]


def calibrate(
    device: str = "auto",
    *,
    ranks: int | None = None,
    name: str | None = None,
    out: Path | None = None,
    duration_s: float = 30,
) -> CalibrationResult:
    """Measure this machine in about `duration_s` seconds, and write its device and cluster into the folder `out`.

    `device` is "cpu", "cuda" or "auto", GPUs if there are; `ranks` work at once, by default one a GPU, or one a core;
    `name` is that in the catalogue. Raises ConfigError before anything is measured for what cannot be.
    """
    device_type = _device_type(device)
    num_ranks = _num_ranks(device_type, ranks)
    files = _files(out or user_folder(), device_type, num_ranks, name)
    found, cluster = measured_machine(device_type, num_ranks, name=name, duration_s=duration_s)
    if (busy := found.calibration_error) is not None:
        logger.warning(
            "other programs took %s of the cores while they were measured: intervals of predictions are wider by that, "
            "and the rates of collectives may be wrong by more; calibrate again while the machine is idle",
            format_quantity(busy.value, SHARE),
        )
    _write(files, found, cluster)
    return CalibrationResult(found, cluster, files)


def measured_machine(
    device_type: str, num_ranks: int, *, name: str | None = None, duration_s: float = 30
) -> tuple[Device, Cluster]:
    """Return this machine's "cpu" or "cuda" device and the cluster of `num_ranks`, measured in about `duration_s`."""
    menu = CUDA_SIZES if device_type == "cuda" else CPU_SIZES
    machine = this_machine(device_type, num_ranks, name)
    # Before ranks are started, which sets OMP_NUM_THREADS where it is not set.
    threads = num_threads(num_ranks)
    with elapsed("measuring matrix products, attention, memory and collectives") as show:
        once = partial(_on_ranks, num_ranks, duration_s, device_type, measure, device_type, menu, duration_s, threads)
        measured = mean_of(once())
        if _is_noisy(machine, measured):
            show("measuring again: other work was in the way")
            measured = mean_of(once())
        for note in unread_rates(machine, measured):
            logger.warning("%s; measured twice: calibrate again while the machine is idle", note)
        show("timing steps of small jobs")
        steps = []
        # The host's clock does not time an accelerator's operators.
        if device_type == "cpu":
            steps = _profiled(num_ranks, duration_s, threads, slow_dtypes(measured))
    return describe(machine, menu, measured, steps)


def _profiled(num_ranks: int, duration_s: float, threads: int, slow: Sequence[str]) -> list[ProfiledStep]:
    """Return the profiled steps of small jobs of all ranks, with what is FSDP's apart from operators."""
    jobs = list(step_jobs(num_ranks, slow))
    words = [(job.model_dump_json(), ".") for job in (*jobs, *whole_jobs(jobs, num_ranks))]
    of_jobs = TRAINER_STEP.whole, words, threads, duration_s
    steps = list[ProfiledStep]()
    for of_rank in _on_ranks(num_ranks, duration_s, "cpu", profiled_steps, *of_jobs):
        sharded, whole = of_rank[: len(jobs)], of_rank[len(jobs) :]
        steps += [without_hooks(*pair) for pair in zip(sharded, whole, strict=False)] + sharded[len(whole) :]
    return steps


def _is_noisy(machine: CalibratedMachine, measured: Measurements) -> bool:
    """Return whether noise left no rate of some collective to read."""
    try:
        return bool(unread_rates(machine, measured))
    except MeshwrightError:
        return True


def _on_ranks(
    num_ranks: int, duration_s: float, device_type: str, function: Callable[..., Measured], *arguments: object
) -> list[Measured]:
    timeout_s = _PATIENCE * duration_s + _LEAST_S
    try:
        return run_ranks(function, num_ranks, *arguments, timeout_s=timeout_s, device=device_type)
    except RanksFailed as failure:
        raise MeshwrightError(f"calibrate on {counted(num_ranks, 'rank')}: {failure}") from None


def _device_type(device: str) -> str:
    if device == "cuda":
        require_cuda()
    return "cuda" if device == "cuda" or (device == "auto" and torch.cuda.is_available()) else "cpu"


def _num_ranks(device_type: str, ranks: int | None) -> int:
    most = torch.cuda.device_count() if device_type == "cuda" else num_usable_cores()
    if ranks is not None and ranks > most:
        what = "CUDA devices" if device_type == "cuda" else "usable cores"
        raise ConfigError(f"--ranks {ranks}, but this machine has {most} {what}: set --ranks to {most} or fewer")
    return ranks or most


def _files(folder: Path, device_type: str, num_ranks: int, name: str | None) -> tuple[Path, Path]:
    """Return the files to write; raises ConfigError for files that calibrate did not write."""
    name = this_machine(device_type, num_ranks, name).device.name
    files = folder / "devices" / f"{name}.toml", folder / "clusters" / f"{name}.toml"
    for file in files:
        if file.exists() and not file.read_text(encoding="utf-8").startswith(_FIRST_LINE):
            raise ConfigError(f"{file} was not written by calibrate and is kept: give another --name, or rename it")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{file.parent} cannot be made ({error.strerror}): name another folder with --out"
            ) from None
    return files


def _write(files: tuple[Path, Path], device: Device, cluster: Cluster) -> None:
    for file, text in zip(files, (device_toml(device), cluster_toml(cluster)), strict=True):
        try:
            file.write_text(_FIRST_LINE + text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{file} cannot be written ({error.strerror}): name another folder with --out") from None
