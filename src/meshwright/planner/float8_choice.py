"""Float8Choice: which float8 recipe a job runs on a device, and which linear layers stay in precision.compute.

Settled once from the job and the device, the same for plan, check, simulate and train: first the recipe that the device
runs (spec/job/float8_ladder.py), then the layers that are predicted to be slower in it (float8_filter.py). A job of
which no layer is left computes in precision.compute.
"""

from typing import NamedTuple

from meshwright.cost.stack_factors import OURS, load_stack
from meshwright.cost.training_setup import TrainingSetup
from meshwright.planner.float8_filter import experts_are_slower, is_low, slower_layers
from meshwright.spec.job.float8_ladder import EMULATED, experts_obstacle, fallback_text, recipe_of_device
from meshwright.spec.job.job import Job
from meshwright.spec.job.sections import PrecisionSection
from meshwright.spec.machine.cluster import Cluster
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.model.model_spec import ModelSpec, model_spec
from meshwright.spec.model.op import FLOAT8_ALIGNMENT, GroupedMatmul, Matmul
from meshwright.spec.model.wide_matmuls import with_wide_matmuls
from meshwright.units import first_of


class Float8Choice(NamedTuple):
    """What the [precision] of a job comes to."""

    precision: PrecisionSection
    """With the recipe that runs, and every layer that stays in compute in float8_skip."""
    note: str = ""
    """Why it differs from what the job asks for; "" where it does not."""


def choose_float8(job: Job, cluster: Cluster, *, emulates: bool = False, option: str = "") -> Float8Choice:
    """Return the choice for `job` on devices of `cluster`; `emulates` keeps an emulated recipe, as training does.

    `option` is what asked for the recipe in place of precision.float8, which the note then names.
    """
    asked, device = job.precision, cluster.device
    name = option or f'precision.float8 = "{asked.float8}"'
    if asked.float8 == "none":
        return Float8Choice(asked)
    if device.emulates_float8 and asked.float8_filter != "none":
        # No prediction decides: emulation rounds, and then multiplies as without.
        why = f"{device.name} {EMULATED}, so that every layer stays in {asked.compute}"
        return Float8Choice(_without(asked), f'precision.float8_filter = "{asked.float8_filter}": {why}')
    keeps = emulates and device.emulates_float8
    recipe, why = (asked.float8, "") if keeps else recipe_of_device(asked.float8, device)
    if recipe == "none":
        return Float8Choice(_without(asked), f"{name}: {fallback_text(asked, recipe, device, why)}")
    notes = [f"{name}: {fallback_text(asked, recipe, device, why)}"] if why else []
    runs = asked.replace(float8=recipe)
    if asked.float8_experts and (why := experts_obstacle(device)):
        notes.append(f"precision.float8_experts: {device.name} {why}; experts are computed in {asked.compute}")
        runs = runs.replace(float8_experts=False)
    architecture = resolve_architecture(job.model)
    emulated = [f"{name}: {device.name} {EMULATED}"] if keeps else []
    if architecture is None:
        return Float8Choice(runs, "; ".join([*notes, *emulated]))
    model = with_wide_matmuls(model_spec(architecture), asked.float8_skip)
    runs, of_layers = _without_slower(job.replace(precision=runs), model, cluster)
    notes += of_layers
    if not _has_low(with_wide_matmuls(model, runs.float8_skip), runs):
        notes.append(f"{name}: no layer of a block is left; computed in {asked.compute}")
        return Float8Choice(_without(asked), "; ".join(notes))
    return Float8Choice(runs, "; ".join([*notes, *emulated]))


def _without(precision: PrecisionSection) -> PrecisionSection:
    return precision.replace(float8="none", float8_skip=(), float8_filter="none", float8_experts=False)


def _without_slower(job: Job, model: ModelSpec, cluster: Cluster) -> tuple[PrecisionSection, list[str]]:
    """Return the precision without what the job's filter leaves in compute, and the sentences that say so."""
    asked, device = job.precision, cluster.device
    if device.emulates_float8 or (asked.float8_filter == "none" and not asked.float8_experts):
        return asked, []
    setup, microbatch_size = _setup(job, model, cluster), 1 if job.layout.search else job.layout.microbatch_size
    slow_experts = asked.float8_experts and experts_are_slower(setup, microbatch_size)
    if asked.float8_filter == "none":
        advice = f'precision.float8_filter = "slower" leaves them in {asked.compute}'
        text = f"precision.float8_experts: experts are predicted to be slower in float8 on {device.name}; {advice}"
        return asked, [text] if slow_experts else []
    slower = slower_layers(setup, microbatch_size)
    kept = [*([first_of(slower)] if slower else []), *(["the experts"] if slow_experts else [])]
    verb = "stays" if len(slower) == 1 and not slow_experts else "stay"
    text = (
        f'precision.float8_filter = "{asked.float8_filter}": {" and ".join(kept)} {verb} in {asked.compute}, predicted '
        f"to be slower in float8 on {device.name}"
    )
    runs = asked.replace(
        float8_skip=(*asked.float8_skip, *slower),
        float8_filter="none",
        float8_experts=asked.float8_experts and not slow_experts,
    )
    return runs, [text] if kept else []


def _setup(job: Job, model: ModelSpec, cluster: Cluster) -> TrainingSetup:
    layout, stack = job.layout, load_stack(OURS)
    # Which kernels and microbatches a search finds is not known yet.
    settled = layout.replace(compile=True) if layout.compile == "auto" else layout
    compiles = layout.search or settled.compiles_blocks
    stack = stack.replace(kernels="compiled") if compiles else stack
    return TrainingSetup(model, job.workload, cluster, stack)


def _has_low(model: ModelSpec, precision: PrecisionSection) -> bool:
    ops = [op for group in model.groups if group.name for op in group.ops]
    has_experts = precision.float8_experts and any(isinstance(op, GroupedMatmul) for op in ops)
    return has_experts or any(isinstance(op, Matmul) and is_low(op) and _is_aligned(op) for op in ops)


def _is_aligned(op: Matmul) -> bool:
    return op.out_features % FLOAT8_ALIGNMENT == op.in_features % FLOAT8_ALIGNMENT == 0
