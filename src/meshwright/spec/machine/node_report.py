"""NodeReport and PathTest: what one node of a run reports of itself, and what was measured between two of them."""

from meshwright.spec.frozen import Frozen


class NetworkPath(Frozen):
    """How one kind of traffic leaves a node."""

    name: str
    """rendezvous (torchrun's store, and that of the checkpoint writers), gloo or NCCL."""
    address: str | None
    """The node's own address on it; None where none was found."""
    interface: str | None
    """The interface that has the address."""
    network: str | None = None
    """The address and prefix length of the interface's network, such as 10.77.0.0/24; None if unknown."""
    bytes_per_s: float | None = None
    """What the interface says of its speed, per direction; None if unknown."""
    why: str
    """The setting, or the default, that the choice comes from."""

    @property
    def is_loopback(self) -> bool:
        """Return whether other hosts cannot reach the address."""
        return self.address is not None and (self.address.startswith("127.") or self.address == "::1")


class NodeReport(Frozen):
    """One node."""

    node: int
    """Its number, from 0: torchrun's GROUP_RANK."""
    host: str
    paths: list[NetworkPath]
    shared_memory_bytes: int | None
    """The size of /dev/shm; None without one."""
    max_open_files: int | None
    """ulimit -n; None: no limit."""
    max_locked_bytes: int | None
    """ulimit -l; None: no limit. InfiniBand registers, which locks, the memory that it sends from."""
    has_infiniband: bool
    versions: dict[str, str]
    """Of Python, torch and Meshwright."""


class ClockOffset(Frozen):
    """How far a node's clock is ahead of that of node 0, in seconds; the true value lies between the bounds."""

    node: int
    least_s: float
    most_s: float

    @property
    def offset_s(self) -> float:
        """Return the middle of the bounds."""
        return (self.least_s + self.most_s) / 2

    @property
    def error_s(self) -> float:
        """Return half the distance of the bounds."""
        return (self.most_s - self.least_s) / 2


class PathTest(Frozen):
    """A TCP connection between two nodes, by the addresses of one or several paths."""

    names: list[str]
    """The paths that have these two addresses."""
    nodes: list[int]
    """The one that served the test and the one that connected."""
    latency_s: float | None = None
    """Half of the median time of a round trip of one byte."""
    bytes_per_s: float | None = None
    """Of one TCP stream, in the slower direction."""
    error: str | None = None
    """Why there is no connection."""


class ClusterReport(Frozen):
    """What `meshwright doctor` finds on several nodes."""

    nodes: list[NodeReport]
    clocks: list[ClockOffset]
    """Of every node but the first."""
    tests: list[PathTest]
    """Of neighbouring nodes."""
    folder: str | None = None
    """The folder that every node looked for a file of node 0 in."""
    blind_nodes: list[int] = []
    """The nodes that did not see that file."""
    num_ranks: int
    """Ranks that torchrun started on all nodes."""
