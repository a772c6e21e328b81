"""cluster_of: the machine of a measured run, from its row and, where that is silent, from the catalogue."""

import re
import tomllib
from functools import lru_cache
from pathlib import Path

from meshwright.cost.achieved_rates import architecture_of
from meshwright.errors import MeshwrightError, UnsupportedError
from meshwright.evaluation.dataset.row import RunRow
from meshwright.hardware.catalogue import load_cluster, load_device
from meshwright.spec.machine.cluster import Cluster, Link
from meshwright.spec.machine.device import Figure, Source

USUAL_CLUSTERS: dict[str, str] = tomllib.loads(
    Path(__file__).with_name("usual_clusters.toml").read_text(encoding="utf-8")
)
"""Cluster of the catalogue for each spelling of a device, the first that matches; /NAME puts another device in it."""

_RATE = re.compile(r"(?:(\d+)\s*x\s*)?(?:[A-Za-z-]+ )?(\d+(?:\.\d+)?) ?Gb/s", re.IGNORECASE)


def cluster_of(row: RunRow, assumed: list[str]) -> Cluster:
    """Return the row's cluster; raises UnsupportedError for a device that the catalogue does not have."""
    base = _usual_cluster(row)
    devices, per_node = row.required("n_gpus"), row.count("gpus_per_node") or base.devices_per_node
    domain = row.count("nvlink_domain")
    if domain is None:
        domain = max(base.domain_size, per_node) if base.domain_size > base.devices_per_node else per_node
    domain = max(domain, per_node) if domain % per_node == 0 or per_node % domain else per_node
    per_node = min(per_node, devices)
    if devices % per_node:
        per_node = devices
    network = _network(row, base, per_node, assumed)
    return base.replace(
        num_devices=devices,
        devices_per_node=per_node,
        nvlink_domain_size=domain if domain % per_node == 0 else None,
        inter_node=network,
        num_nics_per_node=None if network is None else per_node,
    )


@lru_cache
def _load(name: str) -> Cluster:
    cluster, _, device = name.partition("/")
    found = load_cluster(cluster)
    return found.replace(device=load_device(device)) if device else found


def _usual_cluster(row: RunRow) -> Cluster:
    device = row.text("gpu").upper()
    if "Omni-Path" in row.text("interconnect"):
        device += " OMNI-PATH"
    for pattern, name in USUAL_CLUSTERS.items():
        if re.search(pattern, device):
            return _limited(_load(name)) if "LIMITED" in device else _load(name)
    try:
        return _load(row.text("gpu").lower())
    except MeshwrightError:
        raise UnsupportedError(f"gpu = {row.text('gpu')!r} is no device of the catalogue") from None


def _limited(cluster: Cluster) -> Cluster:
    """Return the cluster with devices under a power cap of unknown watts: their rates are constants of their own."""
    device = cluster.device
    limited = device.replace(name=f"{device.name}-limited", architecture=f"{device.architecture}-limited")
    try:
        architecture_of(limited)
    except UnsupportedError:
        raise UnsupportedError(f"gpu is a {device.name} under a power limit, whose rates are unknown") from None
    return cluster.replace(device=limited)


def _network(row: RunRow, base: Cluster, per_node: int, assumed: list[str]) -> Link | None:
    """Return the link between nodes with one card a device, whatever the node's cards are."""
    stated = _stated_bytes_per_s(row.text("interconnect"), per_node)
    usual = base.inter_node
    if stated is None:
        if usual is None:
            return None
        share = base.inter_node_bytes_per_s_per_device
        assert share is not None
        assumed.append(f"network of {base.name}: {share * 8 / 1e9:g} Gb/s for each device")
        return usual.replace(bytes_per_s=usual.bytes_per_s.replace(value=share))
    source = Source(title=f"measured run {row.id}: {row.text('interconnect')}", date="2026", kind="reported")
    figure = Figure(value=stated, source=source)
    name = row.text("interconnect")
    return Link(name=name, bytes_per_s=figure) if usual is None else usual.replace(name=name, bytes_per_s=figure)


def _stated_bytes_per_s(text: str, per_node: int) -> float | None:
    """Return each device's share of the network that `text` states, bytes/s; None if it states no rate."""
    match = _RATE.search(text)
    cards = re.search(r"(\d+)\s*x\s*(?:Omni|NDR|HDR|EDR|XDR|\d)", text)
    if match is None:
        return None
    rate = float(re.findall(r"(\d+(?:\.\d+)?) ?Gb/s", text)[0]) * 1e9 / 8
    if cards:
        return rate * int(cards.group(1)) / per_node
    return rate / per_node if "per node" in text else rate
