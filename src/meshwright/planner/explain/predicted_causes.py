"""predicted_causes: the formulas' step as the causes of one rank's measured step, to be compared with it.

    floor     model FLOPs over the dense peak of all devices: of matmuls, of attention
    host      on a host, whose formulas count the time between operators as memory-bound ops: split off as CPU-bound
    stage     of a pipeline rank that computes `share` of the mean: each cause of a microbatch x share, and that much
              less bubble, so that the step is the same

Ignored: that stages differ in what they compute, other than in how long.
"""

from typing import NamedTuple

import numpy as np

from meshwright.cost.constants import fitted_constants
from meshwright.cost.layout_table import layout_table
from meshwright.cost.step_times import step_pricer, unit_shares
from meshwright.planner.request import PlanRequest
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.schedule.schedule import build_schedule
from meshwright.spec.layout.stage_split import stage_boundaries
from meshwright.spec.step.estimate import StepDecomposition
from meshwright.spec.step.step_causes import Floor

_OF_MICROBATCHES = (
    "gemm_inefficiency_s", "tile_and_wave_quantization_s", "attention_inefficiency_s", "memory_bound_ops_s",
    "cpu_bound_s", "recomputation_s", "repeated_backward_s", "tp_communication_s", "cp_communication_s",
    "ep_communication_s",
)  # fmt: skip
"""Causes that a pipeline rank has once for each microbatch, above the floor."""


class PricedFloor(NamedTuple):
    """What formulas know of a step besides its causes."""

    floor: Floor
    host_s: float
    """Seconds of a host between its operators; 0 for devices, whose formulas have them as a cause."""


def floor_of(layout: Layout, request: PlanRequest) -> PricedFloor:
    """Return the floor of a step in `layout`, and what its causes count as memory-bound ops of a host's own time."""
    configs = request.configs(layout_table([layout]))
    pricer = step_pricer(configs)
    blocks, first, last = pricer.passes(fitted_constants())
    passes = (blocks + first + last) * (configs.num_microbatches / layout.pp)
    columns = passes.ideal_matmul, passes.ideal_attention, pricer.host_as_memory_ops_s(passes)
    matmul_s, attention_s, host_s = (float(np.asarray(column)[0]) for column in columns)
    return PricedFloor(Floor(matmul_s, attention_s), host_s)


def predicted_causes(step: StepDecomposition, priced: PricedFloor, share: float = 1.0) -> StepDecomposition:
    """Return `step` as the causes of a rank that computes `share` of the mean over all pipeline ranks."""
    host_s = min(priced.host_s, step.memory_bound_ops_s)
    step = step.replace(memory_bound_ops_s=step.memory_bound_ops_s - host_s, cpu_bound_s=step.cpu_bound_s + host_s)
    steady_s = step.model_flops_at_peak_s + sum(getattr(step, name) for name in _OF_MICROBATCHES)
    # No more than the bubble is another stage's: the step stays what it is.
    more = min(share - 1, step.pipeline_bubble_s / steady_s) if steady_s else 0.0
    changed = {name: (1 + more) * getattr(step, name) for name in _OF_MICROBATCHES}
    # The floor is that of the whole step: what a slow stage computes more is above it.
    changed["gemm_inefficiency_s"] += more * step.model_flops_at_peak_s
    return step.replace(**changed, pipeline_bubble_s=max(step.pipeline_bubble_s - more * steady_s, 0.0))


def share_of_rank(layout: Layout, pipeline_rank: int, request: PlanRequest) -> float:
    """Return what a pipeline rank computes of a microbatch, as a multiple of the mean over its pipeline's ranks."""
    if layout.pp == 1:
        return 1.0
    [units] = unit_shares(request.configs(layout_table([layout])))
    cuts = stage_boundaries(layout, request.setup.model, request.workload.seq_len)
    # The embedding is in the first stage, the head in the last one.
    edges = [0, *(cut + 1 for cut in cuts), len(units)]
    own = build_schedule(layout, layout.pp * layout.stages_per_rank).stages_of_rank(pipeline_rank)
    return layout.pp * sum(sum(units[edges[stage] : edges[stage + 1]]) for stage in own) / sum(units)
