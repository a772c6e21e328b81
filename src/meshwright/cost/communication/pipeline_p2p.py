"""PipelineP2P: what pipeline ranks send each other, in seconds, and Send, one rank to the next of its group.

    message      the residual stream of a microbatch to the next stage, its gradient to the one before
    exposed      2 (share x microbatches x chunks x slowest hop + (pp - 1) x mean hop): a share, fitted by stack, of the
                 steady state, and the way there and back of one microbatch through the empty pipeline
    tied head    the first and the last stage exchange its gradients once a step, in our own software, unless one rank
                 holds both

A finalist's exposed messages are replayed instead, each by the border that it crosses (replay.py). Source: Narayanan et
al. 2021 (arXiv:2104.04473). Ignored: what others' software does about a tied head.

Send: one rank to the next of its group, as pipeline stages and rings of keys and values do:

    hop     = base + step + bytes / rate      of the tier that the two ranks' positions cross: domain, pod or spine
    slowest = a hop across whatever border the chain crosses anywhere: it sets the pace of a ring or a full pipeline
    mean    = over the n - 1 hops of the chain, of which ceil(n stride / size) - 1 cross a border of domains or pods:
              what one microbatch takes on its way through an empty pipeline

Each device sends at once with the others of its node, so it has its own share of the network cards and no more. At a
pod's border as many ranks send as stand between two members of a group, `stride`, or all of the pod (collective.py).
Source: NCCL's latencies (see fabric.py). Ignored: the way back, on links that carry both directions in full; that two
hops of one pipeline may cross the same border at the same time, which the simulator shows.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from meshwright.cost.blocks.work import Work, work_of
from meshwright.cost.communication.collective import (
    RankGroup,
    all_gather_s,
    group_of,
    network_bytes_per_s,
    where_measured,
)
from meshwright.cost.communication.fabric import Fabric, FabricConstants, fabric_of, stack_fabrics
from meshwright.cost.constants import Constants
from meshwright.cost.layout_table import Floats
from meshwright.cost.pipeline.replay import Hops
from meshwright.cost.stack_factors import stacks_of
from meshwright.cost.training_setup import Configurations
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

    def hops(self, fabric: Fabric, c: Constants) -> list[Hops]:
        """Return how long messages are on their way between the pipeline ranks of each configuration."""
        group, added_s = self._group(fabric), self._added_s(fabric, c)
        borders_s = np.stack([one + added_s for one in hops_by_border_s(self._bytes(), group, fabric)], axis=1)
        per_domain = np.maximum(fabric.domain_size // group.stride, 1)
        columns = (self.layouts.pp, group.stride, per_domain, fabric.nonblocking_devices, self._tied_s(fabric))
        rows = zip(borders_s.tolist(), *np.broadcast_arrays(*columns), strict=True)
        return [
            Hops(
                hop_s=tuple(hop_s),
                domains=tuple((np.arange(pp) // per_domain).astype(int).tolist()),
                pods=tuple((np.arange(pp) * stride // per_pod).astype(int).tolist()),
                tied_s=float(tied_s),
            )
            for hop_s, pp, stride, per_domain, per_pod, tied_s in rows
        ]

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


def hops_of(configs: Configurations, constants: Constants) -> list[Hops]:
    """Return how long messages are on their way between the pipeline ranks of each configuration."""
    fabrics = [fabric_of(setup.cluster, FabricConstants()) for setup in configs.setups]
    limited = stack_fabrics(fabrics, configs.setup_index).limited(configs.layouts.communication_sms)
    fabric = stacks_of(configs).slowed(limited, constants)
    return PipelineP2P(configs, work_of(configs)).hops(fabric, constants)


def send_s(num_bytes: ArrayLike, group: RankGroup, fabric: Fabric) -> Floats:
    """Return the seconds of the slowest hop of `num_bytes` between neighbours of the group; 0 in a group of one."""
    return hop_s(num_bytes, group, np.where(_num_pods(group, fabric) > 1, _crossing(group, fabric), 0.0), fabric)


def mean_send_s(num_bytes: ArrayLike, group: RankGroup, fabric: Fabric) -> Floats:
    """Return the mean seconds of the hops of `num_bytes` from the group's first rank to its last."""
    num_hops = np.maximum(group.num_ranks - 1, 1)
    across_domains = np.minimum(group.num_domains - 1, num_hops) / num_hops
    across_pods = np.minimum(_num_pods(group, fabric) - 1, num_hops) / num_hops
    shares = (1 - across_domains, across_domains - across_pods, across_pods)
    # A link without a known rate has no price, and where no hop crosses it none is needed.
    by_border = zip(shares, hops_by_border_s(num_bytes, group, fabric), strict=True)
    return np.asarray(sum(np.where(share > 0, share * seconds, 0.0) for share, seconds in by_border))


def hops_by_border_s(num_bytes: ArrayLike, group: RankGroup, fabric: Fabric) -> tuple[Floats, Floats, Floats]:
    """Return the seconds of a hop inside of a domain, of one to another domain, and of one to another pod."""
    inside = replace(group, num_domains=np.minimum(group.num_domains, 1))
    return (
        hop_s(num_bytes, inside, 0.0, fabric),
        hop_s(num_bytes, group, 0.0, fabric),
        hop_s(num_bytes, group, _crossing(group, fabric), fabric),
    )


def hop_s(num_bytes: ArrayLike, group: RankGroup, crossing: ArrayLike, fabric: Fabric) -> Floats:
    """Return the seconds of one hop, across domains if `group` lies in more than one.

    `crossing` is the part of a pod's devices that send out of the pod at the same time; 0 inside a pod.
    """
    crosses = group.num_domains > 1
    inside_bytes_per_s = np.minimum(fabric.intra_bytes_per_s, fabric.intra_bytes_per_s_per_peer)
    across_bytes_per_s = network_bytes_per_s(np.asarray(crossing, np.float64), fabric)
    bytes_per_s = np.where(crosses, across_bytes_per_s, inside_bytes_per_s)
    step_s = np.where(crosses, fabric.inter_step_s, fabric.intra_step_s)
    seconds = fabric.base_s + step_s + np.asarray(num_bytes, np.float64) / bytes_per_s
    return where_measured("send", num_bytes, seconds, group, fabric)


def _num_pods(group: RankGroup, fabric: Fabric) -> Floats:
    return np.maximum(np.ceil(group.width / fabric.nonblocking_devices), 1.0)


def _crossing(group: RankGroup, fabric: Fabric) -> Floats:
    """Return which part of a pod's devices send out of it."""
    return np.asarray(np.minimum(group.stride / fabric.nonblocking_devices, 1.0))
