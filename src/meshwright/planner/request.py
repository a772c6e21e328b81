"""PlanRequest: what to plan: a model, a step's tokens, a cluster, keys that are fixed; and whether rates are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from meshwright.cost.layout_table import ATTENTION_BACKENDS, LayoutTable, distinct_rows
from meshwright.cost.own_stack import OwnChoices, own_stack
from meshwright.cost.training_setup import Configurations, TrainingSetup
from meshwright.errors import InfeasibleLayout
from meshwright.spec.job.job import Job
from meshwright.spec.job.sections import DEFAULT_MEMORY_MARGIN, DType
from meshwright.spec.layout.layout import Layout
from meshwright.spec.machine.cluster import Cluster
from meshwright.spec.machine.device import Device, MatmulRates
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.step.workload import FLOAT8_PRECISIONS, MATMUL_DTYPE, Precision, Workload


@dataclass(frozen=True)
class PlanRequest:
    """A request to the planner."""

    model_name: str
    """The model as the user named it."""
    architecture: LlamaArchitecture
    """Its sizes."""
    setup: TrainingSetup
    """The model, the workload, the cluster and the software stack; every device of the cluster is used."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the layout that the search may not change, with their values."""
    given: Layout | None = None
    """A layout that was set by hand and is judged next to the planner's pick."""

    memory_margin: float = DEFAULT_MEMORY_MARGIN
    """Share of the usable memory that layouts leave free to be chosen; one that is given fits without."""
    asked_precision: str = ""
    """The workload's precision that the job or --precision asks for; "" where it is the one that it has."""
    float8_note: str = ""
    """What runs in place of the float8 matmuls that the job asks for, and why; "" where they run."""
    recompute_note: str = ""
    """What the blocks of `given` are taken to save where the job says "auto"; "" where it does not."""
    recompute_misfit: InfeasibleLayout | None = None
    """Why no choice of what they save fits; None where one does."""

    @property
    def precision_note(self) -> str:
        """Return why no matmul is in the float8 that was asked for; "" where some are, or none was."""
        found = self.workload.precision
        is_as_asked = found in FLOAT8_PRECISIONS.values() and self.asked_precision in ("", found)
        return "" if is_as_asked else self.float8_note

    @property
    def margin_bytes(self) -> float:
        """Return the memory of a device that layouts leave free to be chosen."""
        return self.memory_margin * self.cluster.device.usable_memory_bytes

    @property
    def workload(self) -> Workload:
        """Return what a step processes."""
        return self.setup.workload

    @property
    def cluster(self) -> Cluster:
        """Return the cluster."""
        return self.setup.cluster

    @property
    def num_devices(self) -> int:
        """Return the devices that every layout uses."""
        return self.setup.cluster.num_devices

    def configs(self, layouts: LayoutTable) -> Configurations:
        """Return the layouts in the request's setup; those of our own trainer with the kernels that they ask for.

        That is compiled kernels of blocks, loss and update, replayed ones, and the kernels of attention's backend.
        """
        setup = self.setup
        if setup.stack.kernels != "eager":
            return Configurations.of_one(setup, layouts)
        # What other software attends with is in its stack.
        backends = layouts.attention_backend * setup.is_own
        choices = (layouts.compiles_blocks, layouts.compile_loss, layouts.compile_optimizer, layouts.cuda_graphs)
        first, index = distinct_rows((backends, *choices))
        setups = tuple(
            replace(
                setup,
                stack=own_stack(setup.stack, OwnChoices(*(bool(choice[row]) for choice in choices))),
                attention_backend=ATTENTION_BACKENDS[backends[row]],
            )
            for row in first[: len(layouts)]
        )
        return Configurations(setups or (setup,), index, layouts)

    def with_setup(self, **changes: Any) -> PlanRequest:
        """Return the same request with another model, workload, cluster or stack."""
        return replace(self, setup=replace(self.setup, **changes))


def dense_peak(device: Device, dtype: str) -> float | None:
    """Return the dense peak of matmuls in `dtype` on the device, FLOP/s; None where it is unknown."""
    if dtype == "float16":  # devices multiply both 16-bit formats at one rate
        return device.peak_flops_per_s(dtype) or device.peak_flops_per_s("bfloat16")
    return device.peak_flops_per_s(dtype)


def pools_note(job: Job, device: Device) -> str:
    """Return what a price leaves out of the memory pools that `job` names; "" where that is nothing."""
    if not device.has_own_memory or job.memory.communication == "device":
        return ""
    return (
        f'memory.communication = "{job.memory.communication}" is not priced: whether the fabric has NVLink SHARP, and '
        "what registered buffers gain on it, is in no catalogue entry"
    )


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
    ways += [f"price other software with `meshwright plan --precision {' or '.join(others)}`"] if others else []
    return "".join(f"{way}, or " for way in ways)


def _has_rate(device: Device, precision: Precision) -> bool:
    dtype = MATMUL_DTYPE[precision]
    return dtype in _known(device) or dense_peak(device, dtype) is not None


def _known(device: Device) -> list[str]:
    """Return the dtypes whose matmul rate is in the catalogue or was measured."""
    rates = device.dense_flops_per_s, device.measured_matmul_flops_per_s
    return [name for name in MatmulRates.model_fields if any(getattr(rate, name) for rate in rates)]
