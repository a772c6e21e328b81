"""The graphs that torch.compile has made in this process, and its time; private, checked in 2.13."""

import sys
from typing import NamedTuple


class CompileCount(NamedTuple):
    """What this process has compiled since it started."""

    num_graphs: int
    """Graphs of forwards: blocks that share a graph count once, a graph's backward not at all."""
    wall_s: float
    """Seconds in the compiler, of forwards and backwards."""
    reads_cache: bool = False
    """Whether any compiled code came from a cache: one that was given, or Inductor's own folder."""


def compile_count() -> CompileCount:
    """Return the count; zeros in a process that has not imported the compiler, which takes seconds."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return CompileCount(0, 0.0)
    hits = utils.counters["inductor"]["fxgraph_cache_hit"] + utils.counters["aot_autograd"]["autograd_cache_hit"]
    num_graphs = utils.counters["stats"]["unique_graphs"]
    return CompileCount(num_graphs, utils.calculate_time_spent()["total_wall_time"], hits > 0)
