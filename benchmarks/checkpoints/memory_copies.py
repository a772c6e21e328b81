"""python -m benchmarks.checkpoints.memory_copies: what do copies of the state in memory cost, what does a restart gain?

Two ranks with 1 GB of sharded float32 in all, each a node of its own (a folder in /dev/shm), so that each rank's files
are written twice and sent once. Figures are medians over rounds, of the slowest rank: the call that starts a copy,
steps of matmuls alone and while copies are in flight, back to back; then the load of the copy on the ranks that wrote
it, after one node has lost its memory, and of a checkpoint from the disk, what the page cache holds of it dropped
before.

Bars: call <= 0.03 s, a step during a copy <= 1.25 of a step alone, a load after a lost node in less time than from the
disk.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import distributed as dist

from benchmarks.checkpoints.states import State, drop_cached, equal, make_state, zeros_like
from benchmarks.checkpoints.timing import Times, step_s, timed
from meshwright.checkpoint.checkpoint import load, save
from meshwright.checkpoint.memory.copy_saver import CopySaver
from meshwright.checkpoint.memory.find_copy import find_copy
from meshwright.checkpoint.memory.memory_folder import MemoryFolder
from meshwright.checkpoint.memory.nodes import Nodes
from meshwright.checkpoint.peers import GroupPeers
from meshwright.trainer.launch.local.local_ranks import run_ranks

HOSTS = ("node0", "node1")


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--niceness", type=int, default=10)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory, tempfile.TemporaryDirectory(dir=".") as disk:
        work = (Path(memory), Path(disk), arguments.rounds, arguments.gigabytes, arguments.niceness)
        times = run_ranks(measure, 2, *work, timeout_s=3000)
    table = Table("what", "median", "most", title=f"{arguments.gigabytes} GB on 2 ranks of 2 nodes")
    for what in times[0]:
        slowest = [max(row) for row in zip(*(own[what] for own in times), strict=True)]
        table.add_row(what, f"{statistics.median(slowest):.3f} s", f"{max(slowest):.3f} s")
    Console().print(table)
    return 0


def measure(memory: Path, disk: Path, rounds: int, gigabytes: float, niceness: int) -> Times:
    """Return the seconds of each part on this rank, by round; a function for ranks."""
    torch.set_num_threads(1)
    times: Times = defaultdict(list)
    state = make_state(0, int(gigabytes * 250e6), num_ranks=2)
    peers, nodes = GroupPeers(), Nodes(HOSTS)
    own = MemoryFolder(memory / HOSTS[peers.rank])
    own.folder.mkdir()
    saver = CopySaver(own, peers, nodes, "benchmark")
    saver.start_background("localhost", niceness)
    saver.num_bytes(state)
    _copy(saver, 0, state, [])
    save(disk / "step-1", state, {"step": 1})
    for number in range(rounds):
        _measure_copies(saver, state, times, first=10 * number + 1)
        _measure_loads(own, peers, nodes, disk / "step-1", state, times)
    saver.close()
    return dict(times)


def _copy(saver: CopySaver, step: int, state: State, steps: list[float]) -> float:
    """Make a copy while training, add the seconds of the steps until it has ended, and return those of the call."""
    started_s = time.perf_counter()
    saver.copy(step, state, {"step": step}, [])
    call_s = time.perf_counter() - started_s
    steps.append(step_s(saver.wait_until_staged))
    while (ended := saver.ended()) is None:
        steps.append(step_s())
    assert ended.error is None, ended.error
    return call_s


def _measure_copies(saver: CopySaver, state: State, times: Times, first: int) -> None:
    dist.barrier()
    times["step alone"].append(statistics.median(step_s() for _ in range(5)))
    steps: list[float] = []
    for step in range(first, first + 2):
        dist.barrier()
        started_s = time.perf_counter()
        times["call that starts a copy"].append(_copy(saver, step, state, steps))
        times["copy, from its start until all nodes have it"].append(time.perf_counter() - started_s)
    times["step during a copy"].append(statistics.median(steps))


def _measure_loads(
    own: MemoryFolder, peers: GroupPeers, nodes: Nodes, folder: Path, state: State, times: Times
) -> None:
    """Measure loads from memory, before and after node 0 lost its own, and from the disk."""
    target = zeros_like(state)

    def from_memory() -> None:
        found = find_copy(own, peers, nodes)
        assert found is not None
        found.load(target)

    timed(times, "load from memory", from_memory)
    assert equal(_local(state), _local(target))
    if peers.rank == 0:
        own.remove_copies()
    timed(times, "load from memory, one node lost", from_memory)
    assert equal(_local(state), _local(target))
    dist.barrier()
    drop_cached(folder)
    timed(times, "load from the disk", lambda: load(folder, target) and None)


def _local(state: State) -> State:
    return {"model": {name: tensor.to_local() for name, tensor in state["model"].items()}}


if __name__ == "__main__":
    raise SystemExit(main())
