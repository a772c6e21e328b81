"""A cluster whose figures are not what the catalogue says: for asking what a plan depends on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshwright.spec.frozen import Frozen
from meshwright.spec.machine.cluster import Cluster, Link
from meshwright.spec.machine.figure import Figure

Change = Callable[[Cluster, float], Cluster]
"""Returns a cluster with some of its figures multiplied by a factor."""

_COMPUTE = ("dense_flops_per_s", "measured_matmul_flops_per_s", "matmul_points", "attention_points")
_MEMORY = ("memory_bytes_per_s", "measured_memory_bytes_per_s", "memory_op_points")
_BANDWIDTH = ("bytes_per_s", "bytes_per_s_per_peer")


def scaled_compute(cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster with the matmul and attention rates of its device times `factor`."""
    return cluster.replace(device=_with_scaled(cluster.device, _COMPUTE, factor))


def scaled_memory(cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster with the bandwidth of its device's memory times `factor`."""
    return cluster.replace(device=_with_scaled(cluster.device, _MEMORY, factor))


def scaled_domain(cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster with the bandwidth inside nodes times `factor`."""
    return cluster.replace(intra_node=_scaled_link(cluster.intra_node, factor))


def scaled_network(cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster with the bandwidth between nodes times `factor`."""
    return cluster.replace(inter_node=_scaled_link(cluster.inter_node, factor))


def _scaled_link(link: Link | None, factor: float) -> Link | None:
    if link is None:
        return None
    points = tuple(_with_scaled(point, ("bytes_per_s",), factor) for point in link.collectives)
    scaled: Link = _with_scaled(link, _BANDWIDTH, factor)
    return scaled.replace(collectives=points)


def _with_scaled(data: Any, names: tuple[str, ...], factor: float) -> Any:
    """Return `data` with every figure in the fields called `names` multiplied by `factor`."""
    return data.replace(**{name: _scaled(getattr(data, name), factor) for name in names})


def _scaled(value: Any, factor: float) -> Any:
    if isinstance(value, Figure):
        return value.replace(value=value.value * factor)
    if isinstance(value, Frozen):
        return value.replace(**{name: _scaled(getattr(value, name), factor) for name in type(value).model_fields})
    return tuple(_scaled(each, factor) for each in value) if isinstance(value, tuple) else value
