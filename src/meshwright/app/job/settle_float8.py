"""precision.float8 and float8_filter, settled before a step is priced, traced or trained."""

from dataclasses import replace

from meshwright.app.job.compile_choice import settled_on
from meshwright.app.job.cpu_training import trains_on_cpu
from meshwright.config.load import ResolvedJob
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.hardware.catalogue import CALIBRATED, LOCAL, load_cluster
from meshwright.hardware.choice import cluster_of_section
from meshwright.log import logger, progress
from meshwright.planner.float8_choice import Float8Choice, choose_float8
from meshwright.spec.job.sections import ClusterSection, PrecisionSection
from meshwright.spec.machine.cluster import Cluster
from meshwright.spec.run.run import Manifest


def settle_float8(resolved: ResolvedJob, cluster: Cluster) -> tuple[ResolvedJob, str]:
    """Return the job with the float8 matmuls that devices of `cluster` run, and why others were asked for, if so."""
    found = choose_float8(resolved.job, cluster)
    return with_precision(resolved, found.precision), found.note


def settle_float8_for_training(resolved: ResolvedJob, resumed: Manifest | None = None) -> ResolvedJob:
    """Return the job with the float8 matmuls of this machine, and log what differs from what it asks for.

    On a CPU float8 is emulated, and a filter leaves none. A run that is resumed keeps the layers that its filter chose.
    Raises ConfigError where a filter has no device to predict for.
    """
    asked = resolved.job.precision
    if asked.float8 == "none":
        return resolved
    if resumed is not None and asked.float8_filter != "none":
        kept = resumed.job.precision
        progress.info("precision.float8_filter: %s, as in the run that is resumed", _words(kept))
        return with_precision(resolved, kept)
    found = _for_this_machine(resolved)
    if found.note:
        is_other = found.precision.float8 != asked.float8
        (logger.warning if is_other else progress.info)("%s", found.note)
    return with_precision(resolved, found.precision)


def settle_float8_for_check(resolved: ResolvedJob, num_ranks: int | None) -> tuple[ResolvedJob, str]:
    """Return the job with the float8 matmuls that it would train with, and why others were asked for; needs no torch.

    As the job asks where that is unknown: on this machine's GPUs, unless cluster.device names them.
    """
    job, section = resolved.job, resolved.job.cluster
    if job.precision.float8 == "none":
        return resolved, ""
    is_here = section.name == LOCAL
    is_cpu = trains_on_cpu(job)
    if is_here and section.device is None and not is_cpu:
        return resolved, ""
    if is_cpu:
        found = choose_float8(job, _processor(section), emulates=True)
        return with_precision(resolved, found.precision), found.note
    try:
        cluster = cluster_of_section(section)
        count = num_ranks or (None if job.layout.search or job.layout.rest_axis else job.layout.num_ranks)
        cluster = cluster if count is None or is_here else cluster.with_num_devices(count)
        found = choose_float8(settled_on(resolved, cluster).job, cluster)
    except MeshwrightError:
        # The line of the step says why nothing is predicted.
        return resolved, ""
    return with_precision(resolved, found.precision), found.note


def with_precision(resolved: ResolvedJob, precision: PrecisionSection) -> ResolvedJob:
    """Return the job with another [precision]."""
    return replace(resolved, job=resolved.job.replace(precision=precision))


def _for_this_machine(resolved: ResolvedJob) -> Float8Choice:
    from meshwright.trainer.launch.ranks import choose_device_type

    job = resolved.job
    section = job.cluster
    if choose_device_type(job.run) != "cuda":
        return choose_float8(job, _processor(section), emulates=True)
    if section.name == LOCAL and section.device is None:
        # The trainer tries the kernels of GPUs that the catalogue does not know.
        if job.precision.float8_filter != "none":
            raise ConfigError(
                f'precision.float8_filter = "{job.precision.float8_filter}" predicts for a device, and this GPU is not '
                "in the catalogue: set cluster.device to one like it (`meshwright list devices`), or name layers in "
                "precision.float8_skip"
            )
        return Float8Choice(job.precision)
    return choose_float8(job, cluster_of_section(section))


def _processor(section: ClusterSection) -> Cluster:
    """Return this machine's processor; the shipped example where it is not calibrated, of which no rate is asked."""
    cluster = cluster_of_section(section.replace(name=LOCAL, device=None))
    return cluster if cluster.device.torch_type == "cpu" else load_cluster(CALIBRATED)


def _words(kept: PrecisionSection) -> str:
    if kept.float8 == "none":
        return f"every layer stays in {kept.compute}"
    skipped = f" without {', '.join(kept.float8_skip)}" if kept.float8_skip else ""
    return f'float8 = "{kept.float8}"{skipped}'
