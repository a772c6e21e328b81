"""causes_of: a measured step of one rank by cause, from the floor up, as the cost model has its predicted one.

    floor                  model FLOPs at the peak: of matmuls and of attention
    GEMM inefficiency      matmuls, forward and backward, less their floor
    attention inefficiency attention kernels, less their floor
    memory-bound ops       every other kernel of forward and backward, with FSDP2's copies and sums
    stragglers             waits for a collective that has not started, since another rank has not arrived
    all others             as in decompose

The causes sum to the step. Ignored: why a kernel takes as long as it does. Kernels of compiled code without a name
count as memory-bound ops.
"""

from typing import NamedTuple

import numpy as np

from meshwright.spec.step.estimate import COMPONENTS, StepDecomposition
from meshwright.spec.step.timeline_decomposition import compute_seconds, seconds_and_waits
from meshwright.spec.trace.timeline import Timeline

_OTHERS_WORK = (
    "tp_communication_s", "cp_communication_s", "ep_communication_s", "dp_communication_s", "pipeline_p2p_s",
    "other_communication_s", "pipeline_bubble_s",
)  # fmt: skip
"""Components in which a rank waits or communicates."""


class Floor(NamedTuple):
    """Model FLOPs of a step over the dense peak of all devices, seconds; zeros for a model of unknown FLOPs."""

    matmul_s: float = 0.0
    attention_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Return what no step can be shorter than."""
        return self.matmul_s + self.attention_s


def critical_rank(timeline: Timeline) -> int:
    """Return the rank that works most and waits least: others wait for it, or for its stage of a pipeline."""
    seconds, _ = seconds_and_waits(timeline)
    own = seconds[:, [place for place, name in enumerate(COMPONENTS) if name not in _OTHERS_WORK]].sum(axis=1)
    return timeline.ranks[int(np.argmax(own))]


def causes_of(timeline: Timeline, rank: int, floor: Floor) -> StepDecomposition:
    """Return the step of `rank` by cause.

    A floor above what was measured, which another peak than the device's own makes, is lowered to that.
    """
    seconds, waits_s = seconds_and_waits(timeline)
    at = timeline.ranks.index(rank)
    parts = dict(zip(COMPONENTS, np.maximum(seconds[at], 0.0).tolist(), strict=True))
    computes_s, kinds = parts.pop("compute_s"), compute_seconds(timeline, rank)
    matmul_s, attention_s = kinds["matmul"], kinds["attention"]
    matmul_floor_s, attention_floor_s = min(floor.matmul_s, matmul_s), min(floor.attention_s, attention_s)
    return StepDecomposition(
        model_flops_at_peak_s=matmul_floor_s + attention_floor_s,
        gemm_inefficiency_s=matmul_s - matmul_floor_s,
        attention_inefficiency_s=attention_s - attention_floor_s,
        memory_bound_ops_s=max(computes_s - matmul_s - attention_s, 0.0),
        stragglers_s=max(float(waits_s[at]), 0.0),
        **parts,
    )
