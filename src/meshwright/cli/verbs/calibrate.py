"""`meshwright calibrate`: measures this machine and writes it as a device and a cluster of the user's own catalogue."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from meshwright.cli.finite_range import FiniteRange
from meshwright.cli.result_command import print_json, result_command

if TYPE_CHECKING:
    from meshwright.calibrator.measure import Measurements
    from meshwright.calibrator.profiled_step import ProfiledStep
    from meshwright.spec.machine.cluster import Cluster
    from meshwright.spec.machine.device import Device

_FIRST_LINE = "# Written by `meshwright calibrate`, which replaces it when it runs again.\n"
# Every size is measured at least once a round, however little time is given, and next to other work it takes longer.
_PATIENCE, _LEAST_S = 10, 600


@result_command
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="auto: GPUs if there are.")
@click.option("--ranks", type=click.IntRange(min=1), help="Ranks that work at once; default: one a GPU, or one a core.")
@click.option("--name", help="Name in the catalogue; default: cpu-local, or the GPU's name and -local.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder; default: your own catalogue's.")
@click.option(
    "--seconds",
    "duration_s",
    type=FiniteRange(min=1),
    default=30,
    show_default=True,
    help="Approximate time of the kernel measurements; a CPU takes as long again for steps.",
)
def command(
    device: str, ranks: int | None, name: str | None, out: Path | None, duration_s: float, as_json: bool
) -> None:
    """Measure this machine: matrix products, attention, memory, host and collectives, with all ranks busy at once.

    Writes devices/NAME.toml and clusters/NAME.toml, which `meshwright plan --cluster NAME:COUNT` understands. Nothing
    else should run meanwhile: what is measured then is half a machine.
    """
    from meshwright.hardware.catalogue import user_folder

    if name is not None:
        _require_name(name)
    device_type = _device_type(device)
    num_ranks = _num_ranks(device_type, ranks)
    folder = out or user_folder()
    files = _files(folder, device_type, num_ranks, name)
    measured_device, cluster = calibrate(device_type, num_ranks, name=name, duration_s=duration_s)
    _write(files, measured_device, cluster)
    if as_json:
        written = {"device": measured_device.to_dict(), "cluster": cluster.to_dict(), "files": list(map(str, files))}
        print_json(written)
    else:
        _show(measured_device, cluster, files)


def calibrate(
    device_type: str, num_ranks: int, *, name: str | None = None, duration_s: float = 30
) -> tuple[Device, Cluster]:
    """Return this machine's "cpu" or "cuda" device and the cluster of `num_ranks`, measured in about `duration_s`."""
    from meshwright.app.progress import elapsed
    from meshwright.calibrator.calibrated_machine import num_threads, this_machine
    from meshwright.calibrator.describe import describe
    from meshwright.calibrator.measure import mean_of
    from meshwright.calibrator.size_grid import CPU_SIZES, CUDA_SIZES

    menu = CUDA_SIZES if device_type == "cuda" else CPU_SIZES
    machine = this_machine(device_type, num_ranks, name)
    # Before ranks are started, which sets OMP_NUM_THREADS where it is not set.
    threads = num_threads(num_ranks)
    with elapsed("measuring matrix products, attention, memory and collectives") as show:
        measured = mean_of(_measure_on_ranks(device_type, num_ranks, threads, duration_s))
        show("timing steps of small jobs")
        steps = _watch_on_ranks(num_ranks, threads, duration_s) if device_type == "cpu" else ()
    return describe(machine, menu, measured, steps)


def _watch_on_ranks(num_ranks: int, threads: int, duration_s: float) -> list[ProfiledStep]:
    """Return the operators of steps of small jobs, on all ranks; the host's clock does not time an accelerator's."""
    from meshwright.calibrator.profiled_step import profiled_steps
    from meshwright.calibrator.step_jobs import step_jobs
    from meshwright.errors import MeshwrightError
    from meshwright.trainer.launch.local_ranks import RanksFailed, run_ranks
    from meshwright.trainer.step.step_builder import TRAINER_STEP
    from meshwright.units import counted

    jobs = [(job.model_dump_json(), ".") for job in step_jobs(num_ranks)]
    try:
        watched = run_ranks(
            profiled_steps,
            num_ranks,
            TRAINER_STEP.whole,
            jobs,
            threads,
            duration_s,
            timeout_s=_PATIENCE * duration_s + _LEAST_S,
        )
    except RanksFailed as failure:
        raise MeshwrightError(f"calibrate on {counted(num_ranks, 'rank')}: {failure}") from None
    return [step for of_rank in watched for step in of_rank]


def _measure_on_ranks(device_type: str, num_ranks: int, threads: int, duration_s: float) -> list[Measurements]:
    from meshwright.calibrator.measure import measure
    from meshwright.calibrator.size_grid import CPU_SIZES, CUDA_SIZES
    from meshwright.errors import MeshwrightError
    from meshwright.trainer.launch.local_ranks import RanksFailed, run_ranks
    from meshwright.units import counted

    menu = CUDA_SIZES if device_type == "cuda" else CPU_SIZES
    try:
        return run_ranks(
            measure,
            num_ranks,
            device_type,
            menu,
            duration_s,
            threads,
            timeout_s=_PATIENCE * duration_s + _LEAST_S,
            device=device_type,
        )
    except RanksFailed as failure:
        raise MeshwrightError(f"calibrate on {counted(num_ranks, 'rank')}: {failure}") from None


def _device_type(device: str) -> str:
    import torch

    from meshwright.cli.cuda import require_cuda

    if device == "cuda":
        require_cuda()
    return "cuda" if device == "cuda" or (device == "auto" and torch.cuda.is_available()) else "cpu"


def _num_ranks(device_type: str, ranks: int | None) -> int:
    import torch

    from meshwright.errors import ConfigError
    from meshwright.hardware.machine import num_usable_cores

    most = torch.cuda.device_count() if device_type == "cuda" else num_usable_cores()
    if ranks is not None and ranks > most:
        what = "CUDA devices" if device_type == "cuda" else "usable cores"
        raise ConfigError(f"--ranks {ranks}, but this machine has {most} {what}: set --ranks to {most} or fewer")
    return ranks or most


def _require_name(name: str) -> None:
    from meshwright.errors import ConfigError
    from meshwright.spec.machine.device import NAME_PATTERN

    if not re.match(NAME_PATTERN, name):
        raise ConfigError(f"--name {name!r} is no catalogue name: use lower-case letters, digits, dots and dashes")


def _files(folder: Path, device_type: str, num_ranks: int, name: str | None) -> tuple[Path, Path]:
    """Return the files to write; raises ConfigError for files that calibrate did not write."""
    from meshwright.calibrator.calibrated_machine import this_machine
    from meshwright.errors import ConfigError

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
    from meshwright.errors import ConfigError
    from meshwright.hardware.entry_toml import cluster_toml, device_toml

    for file, text in zip(files, (device_toml(device), cluster_toml(cluster)), strict=True):
        try:
            file.write_text(_FIRST_LINE + text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{file} cannot be written ({error.strerror}): name another folder with --out") from None


def _show(device: Device, cluster: Cluster, files: tuple[Path, Path]) -> None:
    from meshwright.hardware.quantity import BYTES_PER_S, FLOPS_PER_S, SECONDS, format_quantity

    click.echo(f"{device.title}; each of {cluster.num_devices} ranks, all busy:")
    for dtype, rate in device.measured_matmul_flops_per_s:
        if rate is not None:
            click.echo(f"  {f'matmul, {dtype}, at best':<26} {format_quantity(rate.value, FLOPS_PER_S)}")
    assert device.measured_memory_bytes_per_s is not None
    assert device.host_launch_s is not None
    click.echo(f"  {'memory':<26} {format_quantity(device.measured_memory_bytes_per_s.value, BYTES_PER_S)}")
    click.echo(f"  {'host, for each kernel':<26} {format_quantity(device.host_launch_s.value, SECONDS)}")
    for point in cluster.intra_node.collectives if cluster.intra_node else ():
        latency = format_quantity(point.latency_s.value, SECONDS)
        rate = format_quantity(point.bytes_per_s.value, BYTES_PER_S)
        click.echo(f"  {f'{point.kind} of {point.num_ranks}':<26} {latency}, then {rate}")
    for file in files:
        click.echo(f"wrote {file}")
    click.echo(f"next: meshwright plan JOB --cluster {cluster.name}:{cluster.num_devices}")
