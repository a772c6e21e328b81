"""The graphs that torch.compile has made in this process, and its time; private, checked in 2.13."""

import sys
from typing import NamedTuple


class CompileCount(NamedTuple):
    """What this process has compiled since it started."""

    num_graphs: int
    """Graphs of forwards: blocks that share a graph count once, a graph's backward not at all."""
    wall_s: float
    """Seconds in the compiler, of forwards and backwards."""
    num_cached: int = 0
    """Forwards and backwards whose code came from a cache: one that was given, or Inductor's own folder."""
    num_passes: int = 0
    """Forwards and backwards that Inductor was given, those from a cache included."""


def compile_count() -> CompileCount:
    """Return the count; zeros in a process that has not imported the compiler, which takes seconds."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return CompileCount(0, 0.0)
    inductor, num_graphs = utils.counters["inductor"], utils.counters["stats"]["unique_graphs"]
    # A hit of AOTAutograd's cache counts those of its forward and its backward, too.
    hits, *compiled = (inductor[f"fxgraph_cache_{what}"] for what in ("hit", "miss", "bypass"))
    return CompileCount(num_graphs, utils.calculate_time_spent()["total_wall_time"], hits, hits + sum(compiled))
