"""Cluster: devices grouped in nodes and joined by links."""

import math
from typing import Self

from pydantic import Field, PositiveInt, model_validator

from meshwright.errors import ConfigError
from meshwright.spec.frozen import Frozen
from meshwright.spec.machine.device import NAME_PATTERN, CollectivePoint, Device, Figure, Source
from meshwright.units import counted


class Link(Frozen):
    """What joins devices; bandwidth counts one direction only."""

    name: str = Field(min_length=1)
    """Kind of link, such as NVLink 4 or InfiniBand NDR."""
    bytes_per_s: Figure
    """Bandwidth in one direction, bytes per second: of one device inside a node, of one network card between nodes."""
    bytes_per_s_per_peer: Figure | None = None
    """Bandwidth in one direction to a single peer, where less than bytes_per_s (links without a switch)."""
    latency_s: Figure | None = None
    """Seconds that the smallest message takes."""
    efficiency: Figure | None = None
    """Share of bytes_per_s that large ring collectives reach, 0 to 1."""
    reduces_in_switch: bool = False
    """Whether the switch adds up and multiplies what it passes on (NVLink SHARP), so that NCCL may use NVLS."""
    oversubscription: Figure | None = None
    """Bandwidth of all nodes together over what the network's top carries at once: 7 where 7 nodes share one's."""
    nonblocking_devices: PositiveInt | None = None
    """Devices that communicate without oversubscribed links: a pod."""
    collectives: tuple[CollectivePoint, ...] = Field((), strict=False)
    """Measured collectives over this link; empty if not measured."""


class Cluster(Frozen):
    """Equal devices in equal nodes; num_devices is a default that a job may change."""

    name: str = Field(pattern=NAME_PATTERN)
    """Catalogue name, as in cluster.name."""
    title: str = Field(min_length=1)
    """Name that people use."""
    device: Device
    """The device, the same everywhere."""
    num_devices: PositiveInt
    """Devices in the whole cluster."""
    devices_per_node: PositiveInt
    """Devices in one node."""
    nvlink_domain_size: PositiveInt | None = None
    """Devices that reach each other over intra_node, where that is not the node: 72 in an NVL72 rack."""
    intra_node: Link | None = None
    """What joins the devices of a node (or NVLink domain); None where unknown."""
    inter_node: Link | None = None
    """What joins nodes; None in a single node, or where unknown."""
    num_nics_per_node: PositiveInt | None = None
    """Network cards of a node that carry inter_node traffic."""
    is_usual: bool = False
    """Whether this is what the bare name of its device means: the commonest network of that device."""
    source: Source
    """Where the shape (devices, nodes, network cards) comes from."""
    note: str | None = None
    """What a reader must know about this entry."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.num_devices > self.devices_per_node and self.num_devices % self.devices_per_node:
            raise ValueError(
                f"num_devices = {self.num_devices} is no multiple of devices_per_node = {self.devices_per_node}: "
                "a cluster is made of whole nodes"
            )
        domain, node = self.domain_size, self.devices_per_node
        if domain % node and node % domain:
            raise ValueError(
                f"nvlink_domain_size = {domain} and devices_per_node = {node}: one of them must divide the other"
            )
        if (self.inter_node is None) != (self.num_nics_per_node is None):
            raise ValueError("inter_node and num_nics_per_node belong together: give both, or neither")
        if self.num_devices > max(domain, node) and self.inter_node is None:
            raise ValueError(
                f"num_devices = {self.num_devices} is more than one node (devices_per_node = {node}): "
                "give inter_node and num_nics_per_node"
            )
        return self

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes, a partly used one counted whole."""
        return math.ceil(self.num_devices / self.devices_per_node)

    @property
    def domain_size(self) -> int:
        """Return how many devices reach each other over intra_node: the NVLink domain, or else the node."""
        return self.nvlink_domain_size or self.devices_per_node

    @property
    def inter_node_bytes_per_s_per_device(self) -> float | None:
        """Return each device's share of its node's network in one direction, bytes/s; None without a network."""
        if self.inter_node is None or self.num_nics_per_node is None:
            return None
        return self.inter_node.bytes_per_s.value * self.num_nics_per_node / self.devices_per_node

    def with_num_devices(self, num_devices: int, what: str = "") -> Self:
        """Return the same cluster with `num_devices` devices; raises ConfigError where they are no whole nodes.

        `what` has that many, if it is not what a job or a command line gives as cluster.num_devices.
        """
        if (refusal := self.count_refusal(num_devices)) is not None:
            rule, numbers, otherwise = refusal
            what = what or f"cluster.num_devices = {num_devices}"
            raise ConfigError(f"{what} {rule}: set it to {' or '.join(map(str, numbers))}{otherwise}")
        return self.replace(num_devices=num_devices)

    def count_refusal(self, num_devices: int) -> tuple[str, list[int], str] | None:
        """Return the rule that a number of devices breaks, the nearest numbers that keep it, and what else helps."""
        node = self.devices_per_node
        if num_devices > max(self.domain_size, node) and self.inter_node is None:
            rule = f"but {self.name} is a single node of {counted(node, 'device')} without a network"
            return rule, [node], " or less, or choose another cluster.name"
        if not self.takes(num_devices):
            lower = num_devices // node * node
            rule = f"fills no whole number of {self.name} nodes ({node} devices each)"
            return rule, [lower, lower + node], ""
        return None

    def nearest_multiples(self, product: int) -> list[int]:
        """Return the multiples of `product` next to num_devices that this cluster can have: below, and above."""
        lower = self.num_devices // product * product
        # Whole nodes come round again after this many, so the way up ends.
        last = lower + math.lcm(product, self.devices_per_node)
        ways = range(lower, 0, -product), range(lower + product, last + product, product)
        found = (next(filter(self.takes, way), None) for way in ways)
        return [number for number in found if number is not None]

    def takes(self, num_devices: int) -> bool:
        """Return whether a cluster of this kind can have `num_devices`: whole nodes, or a part of one."""
        node, largest = self.devices_per_node, max(self.domain_size, self.devices_per_node)
        is_whole = num_devices <= node or num_devices % node == 0
        return is_whole and (num_devices <= largest or self.inter_node is not None)
