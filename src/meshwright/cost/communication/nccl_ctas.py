"""CTAs of NCCL's kernels, one SM each, which matmuls next to them lack; what a limit on them changes.

    usual      = min(per link x NVLinks of a device, what NCCL takes at most on its architecture)
                 of a group in several domains: at most 2 for each of its members in one, and thus for each card
    rate       = rate of the links inside a domain x min(1, limit / saturating), of a network card x min(1, limit / 2)
    slowdown   = overlap_slowdown x min(limit, usual) / usual

for layout.communication_sms as the limit; without it nothing changes. The fitted slowdown of computing next to
communication is that of NCCL's usual CTAs. It is taken to be all due to their SMs, so that it shrinks with them: n of N
SMs taken leave a matmul (N - n) / N of its rate, and n = 16 of 132 is 0.121, next to a fitted 0.124.

Sources: constants.toml (nccl_*). Not measured with a limit: the numbers of CTAs are what NCCL's maintainers and logs
say, and that both lines are straight is assumed. Ignored: the wave that a persistent matmul kernel loses when its grid
no longer fits; memory bandwidth that a collective takes however few its SMs; latency; that all-to-alls and P2P usually
take up to 32 CTAs, and symmetric-memory kernels fewer; that async_tp copies by copy engines, without SMs; that a slower
collective leaves links to others.
"""

from meshwright.cost.constants import fixed_constant
from meshwright.spec.layout.layout import Layout
from meshwright.spec.machine.cluster import Cluster

CTAS_PER_CARD = fixed_constant("nccl_ctas_per_link")
"""CTAs that keep a network card busy, as many as for one NVLink."""
_OLDER_LINK, _NVLINK_5 = fixed_constant("nvlink_bytes_per_s"), fixed_constant("nvlink_bytes_per_s.5")
_BLACKWELL = (_NVLINK_5, fixed_constant("nccl_most_ctas.blackwell"), fixed_constant("nccl_saturating_ctas"))
_OF_ARCHITECTURE = {
    "volta": (_OLDER_LINK, fixed_constant("nccl_most_ctas"), fixed_constant("nccl_saturating_ctas")),
    "ampere": (_OLDER_LINK, fixed_constant("nccl_most_ctas.ampere"), fixed_constant("nccl_saturating_ctas")),
    "ada": (_OLDER_LINK, fixed_constant("nccl_most_ctas"), fixed_constant("nccl_saturating_ctas")),
    "hopper": (_OLDER_LINK, fixed_constant("nccl_most_ctas.hopper"), fixed_constant("nccl_saturating_ctas.hopper")),
    "blackwell": _BLACKWELL,
    "blackwell-ultra": _BLACKWELL,
}
"""Bytes per second of one link, the CTAs that a kernel takes at most, and those that saturate the links."""


def ctas_of(cluster: Cluster) -> tuple[float, float]:
    """Return the CTAs that a collective takes inside a domain of `cluster`, and those that saturate the links there.

    0 and 0 where these are unknown: of a host, of other makers, and of a device that was only measured.
    """
    link, known = cluster.intra_node, _OF_ARCHITECTURE.get(cluster.device.architecture or "")
    if known is None or link is None:
        return 0.0, 0.0
    bytes_per_s, most, saturating = known
    usual = min(CTAS_PER_CARD * max(1.0, link.bytes_per_s.value // bytes_per_s), most)
    return usual, min(usual, saturating)


def is_idle_limit(limit: int | None, cluster: Cluster) -> bool:
    """Return whether NCCL takes no more CTAs on `cluster` than a limit allows, so that it changes nothing."""
    usual, _ = ctas_of(cluster)
    return limit is not None and 0 < usual <= limit


def idle_limit_note(layout: Layout, cluster: Cluster, *, on_cpu: bool = False) -> str:
    """Return why layout.communication_sms changes nothing on `cluster`, or its processors; "" where it may."""
    limit = layout.communication_sms
    if limit is None:
        return ""
    given = f"layout.communication_sms = {limit}"
    if layout.num_ranks == 1:
        return f"{given} does nothing on one rank: none communicates"
    if on_cpu or cluster.device.torch_type == "cpu":
        return f"{given} has no effect on a CPU: gloo runs no kernels that take SMs"
    if is_idle_limit(limit, cluster):
        usual = f"{ctas_of(cluster)[0]:.0f}"
        return f"{given} has no effect: NCCL takes {usual} SMs at most on {cluster.name} without it"
    return ""
