"""Checks of all nodes of a run, under torchrun: reports, clocks, a shared folder, and tests of neighbouring nodes."""

import os
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import torch

from meshwright.hardware import machine
from meshwright.hardware.network import has_infiniband, max_locked_bytes, paths_of, resolved_address
from meshwright.hardware.tcp_test import listen, run_test, serve_test
from meshwright.spec.machine.node_report import ClusterReport, NodeReport, PathTest
from meshwright.trainer.cluster.node_store import NodeStore
from meshwright.trainer.run.open_run import versions

_CONNECT_S: Final = 15.0
"""Seconds after which a path counts as closed."""
_VERSIONS: Final = ("python", "torch", "meshwright")


def served_address(addresses: Sequence[str | None], node: int) -> str | None:
    """Return where the other nodes find the store, on node 0, by what each node resolved; None elsewhere.

    Its own host name may lead node 0 to 127.0.1.1.
    """
    return next((one for one in addresses[1:] if one is not None), None) if node == 0 else None


def report_node(environment: Mapping[str, str], *, has_gpus: bool, served: str | None = None) -> NodeReport:
    """Return what this node is like; NCCL's path only where it `has_gpus`. `served` is that of served_address()."""
    shared = machine.shared_memory_bytes()
    found = versions()
    return NodeReport(
        node=int(environment.get("GROUP_RANK", "0")),
        host=socket.gethostname(),
        paths=paths_of(environment, has_gpus=has_gpus, served=served),
        shared_memory_bytes=None if shared is None else shared[0],
        max_open_files=machine.max_open_files(),
        max_locked_bytes=max_locked_bytes(),
        has_infiniband=has_infiniband(),
        versions={name: found[name] for name in _VERSIONS if name in found},
    )


def check_cluster(nodes: NodeStore, folder: Path, num_ranks: int) -> ClusterReport:
    """Return what all nodes are like, and how well neighbours reach each other; called by one process of each node.

    `folder` is where node 0 writes a file, for a moment, that the others look for.
    """
    # A node without GPUs among others with them would make its own list of paths.
    has_gpus = any(nodes.gather(torch.cuda.is_available()))
    served = served_address(nodes.gather(resolved_address(os.environ["MASTER_ADDR"])), nodes.node)
    own = report_node(os.environ, has_gpus=has_gpus, served=served)
    reports = [NodeReport.model_validate(one) for one in nodes.gather(own.model_dump())]
    clocks = nodes.clock_offsets()
    with _shared_file(nodes, folder) as path:
        seen = nodes.gather(_is_visible(path))
    tests = []
    for pairs in _rounds(nodes.num_nodes):
        found: list[PathTest] = []
        for first, second in pairs:
            if nodes.node in (first, second):
                found = _test_pair(nodes, reports, first, second)
        # The end of a round for all nodes: no two tests share a node.
        measured = nodes.gather([one.model_dump() for one in found if one.nodes[1] == nodes.node])
        tests += [PathTest.model_validate(one) for of_node in measured for one in of_node]
    return ClusterReport(
        nodes=reports,
        clocks=clocks,
        tests=tests,
        folder=None if path is None else str(Path(path).parent),
        blind_nodes=[node for node, sees in enumerate(seen) if not sees] if path is not None else [],
        num_ranks=num_ranks,
    )


def _rounds(num_nodes: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the pairs of neighbours in rounds in which each node has one partner at most."""
    if num_nodes == 1:
        return
    pairs = [(node, node + 1) for node in range(num_nodes - 1)]
    yield pairs[0::2]
    if pairs[1::2]:
        yield pairs[1::2]
    if num_nodes > 2:
        yield [(num_nodes - 1, 0)]


def _test_pair(nodes: NodeStore, reports: list[NodeReport], first: int, second: int) -> list[PathTest]:
    """Return the tests of a pair on its second node, which connects; the first serves them."""
    found = []
    for (theirs, own), names in _address_pairs(reports[first], reports[second]).items():
        key = f"test/{first}/{second}/{names[0]}"
        if nodes.node == first:
            _serve(nodes, key, theirs)
        else:
            port = nodes.get(key)
            found.append(_run(names, [first, second], own, theirs, port))
            nodes.put(f"{key}/done", True)
    return found


def _address_pairs(first: NodeReport, second: NodeReport) -> dict[tuple[str, str], list[str]]:
    """Return the paths by the addresses that they have on two nodes; without those that have none."""
    pairs: dict[tuple[str, str], list[str]] = {}
    for theirs, own in zip(first.paths, second.paths, strict=True):
        if theirs.address is not None and own.address is not None:
            pairs.setdefault((theirs.address, own.address), []).append(own.name)
    return pairs


def _serve(nodes: NodeStore, key: str, address: str) -> None:
    try:
        listener = listen(address)
    except OSError as error:
        nodes.put(key, f"cannot listen: {error.strerror}")
        nodes.get(f"{key}/done")
        return
    with listener:
        # A thread: where the other node cannot connect, it says so, and this one need not wait.
        thread = threading.Thread(target=_serve_quietly, args=(listener,), daemon=True)
        thread.start()
        nodes.put(key, listener.getsockname()[1])
        nodes.get(f"{key}/done")
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def _serve_quietly(listener: socket.socket) -> None:
    # The node that connects reports the error.
    with suppress(OSError):
        serve_test(listener, _CONNECT_S)


def _run(names: list[str], nodes: list[int], own: str, address: str, port: int | str) -> PathTest:
    test = PathTest(names=names, nodes=nodes)
    if isinstance(port, str):
        return test.replace(error=port)
    try:
        latency_s, bytes_per_s = run_test(own, address, port, _CONNECT_S)
    except OSError as error:
        return test.replace(error=f"no connection from {own} to {address}: {error.strerror or error}")
    return test.replace(latency_s=latency_s, bytes_per_s=bytes_per_s)


@contextmanager
def _shared_file(nodes: NodeStore, folder: Path) -> Iterator[str | None]:
    """Yield the path of a file that node 0 has in `folder` until all nodes leave; None where it cannot write one."""
    path = None
    if nodes.node == 0:
        with suppress(OSError):
            descriptor, path = tempfile.mkstemp(prefix=".meshwright-doctor-", dir=folder.absolute())
            os.close(descriptor)
    try:
        yield nodes.gather(path)[0]
    finally:
        if path is not None:
            Path(path).unlink(missing_ok=True)


def _is_visible(path: str | None) -> bool:
    if path is None:
        return False
    # Listing a folder of NFS refreshes what is known of it.
    with suppress(OSError):
        os.listdir(Path(path).parent)
    return Path(path).exists()
