"""PipelineP2P: what pipeline ranks send each other, in seconds.

    message      the residual stream of a microbatch to the next stage, its gradient to the one before
    exposed      2 (share x microbatches x chunks x slowest hop + (pp - 1) x mean hop): a share, fitted by stack, of the
                 steady state, and the way there and back of one microbatch through the empty pipeline
    tied head    the first and the last stage exchange its gradients once a step, in our own software, unless one rank
                 holds both

A finalist's exposed messages are replayed instead, each by the border that it crosses (replay.py). Source: Narayanan et
al. 2021 (arXiv:2104.04473). Ignored: what others' software does about a tied head.
"""

from __future__ import annotations

import numpy as np

from meshwright.cost.arrays import Floats
from meshwright.cost.communication.collective import all_gather_s
from meshwright.cost.communication.fabric import Fabric, FabricConstants, fabric_of, stack_fabrics
from meshwright.cost.communication.group import RankGroup, group_of
from meshwright.cost.communication.point_to_point import hops_by_border_s, mean_send_s, send_s
from meshwright.cost.constants import Constants
from meshwright.cost.pipeline.replay import Hops
from meshwright.cost.stack_factors import stacks_of
from meshwright.cost.training_setup import Configurations
from meshwright.cost.work import Work, work_of
from meshwright.spec.layout.layout import V_SCHEDULES
from meshwright.spec.step.workload import BYTES_PER_ELEMENT


class PipelineP2P:
    """Sends and receives of a pipeline, to be priced with a fabric and constants; one element a configuration."""

    def __init__(self, configs: Configurations, work: Work) -> None:
        blocks, layouts = work.blocks, configs.layouts
        self.layouts, self.work = layouts, work
        self.element_bytes = configs.each(lambda s: s.workload.activation_element_bytes)
        self.has_sequence_parallel = configs.has(lambda s: s.stack.sequence_parallel)
        self.overlaps = configs.has(lambda s: s.stack.p2p_overlap)
        tied = np.bincount(blocks.key, blocks.tied_parameters * blocks.count, minlength=len(work.setup_index))
        gradient_bytes = configs.each(lambda s: BYTES_PER_ELEMENT[s.workload.gradient_dtype])
        has_copy = configs.has(lambda s: s.is_own) & (layouts.pp > 1) & ~layouts.has_schedule(V_SCHEDULES)
        self.tied_bytes = has_copy * tied[work.key_of_config] / layouts.fsdp * gradient_bytes
        """Of a tied head's gradients on one rank."""

    def exposed_s(self, fabric: Fabric, c: Constants, num_microbatches: Floats) -> Floats:
        """Return the exposed seconds of all messages in a step."""
        layouts, group = self.layouts, self._group(fabric)
        num_bytes, added_s = self._bytes(), np.where(layouts.pp > 1, self._added_s(fabric, c), 0.0)
        # The slowest sets the pace of a full pipeline; filling it takes all of them once.
        slowest = send_s(num_bytes, group, fabric) + added_s
        mean = mean_send_s(num_bytes, group, fabric) + added_s
        share = np.where(self.overlaps, c["pp_exposed"], c["pp_plain_exposed"])
        waits = np.where(self.overlaps | (layouts.pp == 1), 0.0, c["pp_sync_s"] * num_microbatches)
        steady = share * num_microbatches * layouts.stages_per_rank * slowest
        return 2 * (steady + (layouts.pp - 1) * mean) + waits + self._tied_s(fabric)

    def hops(self, fabric: Fabric, c: Constants) -> Hops:
        """Return how long messages are on their way between the pipeline ranks of the only configuration."""
        group, added_s = self._group(fabric), self._added_s(fabric, c)
        ranks = np.arange(self.layouts.pp[0])
        per_domain = np.maximum(fabric.domain_size // group.stride, 1)
        return Hops(
            hop_s=tuple(float((one + added_s)[0]) for one in hops_by_border_s(self._bytes(), group, fabric)),
            domains=tuple((ranks // per_domain).astype(int).tolist()),
            pods=tuple((ranks * group.stride // fabric.nonblocking_devices).astype(int).tolist()),
            tied_s=float(self._tied_s(fabric)[0]),
        )

    def _group(self, fabric: Fabric) -> RankGroup:
        return group_of(self.layouts.num_ranks // self.layouts.pp, self.layouts.pp, fabric)

    def _bytes(self) -> Floats:
        """Return the bytes of a message. Each tp rank sends its part (Narayanan 2021, 4.1)."""
        blocks = self.work.blocks
        first = np.zeros(len(self.work.setup_index), np.int64)
        first[blocks.key[::-1]] = np.arange(len(blocks.key))[::-1]
        row = first[self.work.key_of_config]
        return blocks.tokens[row] * blocks.width[row] * self.element_bytes / self.layouts.tp

    def _added_s(self, fabric: Fabric, c: Constants) -> Floats:
        """Return what a hop takes besides: without sequence parallelism tp ranks gather the whole again."""
        tp = self.layouts.tp
        whole_s = all_gather_s(self._bytes() * tp, group_of(1, tp, fabric), fabric)
        return np.where(self.has_sequence_parallel, 0.0, whole_s) + c["send_s"]

    def _tied_s(self, fabric: Fabric) -> Floats:
        """Return the seconds of exchanging the gradients of a tied head, one way after the other."""
        return np.where(self.tied_bytes > 0, 2 * send_s(self.tied_bytes, self._group(fabric), fabric), 0.0)


def hops_of(configs: Configurations, constants: Constants) -> Hops:
    """Return how long messages are on their way between the pipeline ranks of the only configuration."""
    fabrics = [fabric_of(setup.cluster, FabricConstants()) for setup in configs.setups]
    fabric = stacks_of(configs).slowed(stack_fabrics(fabrics, configs.setup_index), constants)
    return PipelineP2P(configs, work_of(configs)).hops(fabric, constants)
