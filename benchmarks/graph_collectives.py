"""python -m benchmarks.graph_collectives: exposed communication of a model's graph, before and after its pass.

Traces a step of llama3-8b with few blocks on 8 and on 64 H100, and simulates it three ways: FSDP2 around compiled
blocks; the model as one graph with a collective for each parameter, waited for at once; and the same graph after
parallelism/graph/collective_buckets.py, which is what `layout.compile = "model"` runs. Nothing is measured: times are
the simulator's. Exposed is data-parallel communication while nothing is computed, the mean over ranks.

Expected, written down before the first run: the graph without the pass exposes all of its communication; with it, as
little as FSDP2 or less, since the same blocks are gathered one ahead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import fx

from meshwright.config.load import load_job
from meshwright.hardware.catalogue import load_cluster
from meshwright.parallelism.graph.collective_buckets import Buckets
from meshwright.simulator.simulate_step import simulate
from meshwright.spec.step.timeline_decomposition import decompose
from meshwright.spec.trace.timeline import Timeline
from meshwright.spec.trace.trace import RecordKind
from meshwright.spec.trace.traces import Traces
from meshwright.tracer.programs.job_steps import StepBuilder
from meshwright.tracer.trace_job import TraceOptions, trace_job
from meshwright.trainer.step import build_step
from meshwright.trainer.step.step_builder import TRAINER_STEP

CLUSTER, JOB = "h100-ib400", "examples/llama3-8b.toml"
BEFORE = StepBuilder("benchmarks.graph_collectives:step_before", "benchmarks.graph_collectives:part_before")
WAYS: dict[str, tuple[StepBuilder, str]] = {
    "blocks, FSDP2": (TRAINER_STEP, "blocks"),
    "model, before the pass": (BEFORE, "model"),
    "model": (TRAINER_STEP, "model"),
}


@click.command()
@click.option("--devices", multiple=True, default=(8, 64), show_default=True, type=int)
@click.option("--layers", default=4, show_default=True, help="Blocks of the model.")
@click.option("--seq-len", default=8192, show_default=True)
@click.option("--set", "overrides", multiple=True, help="Further keys of the job, such as layout.tp=2.")
def main(devices: tuple[int, ...], layers: int, seq_len: int, overrides: tuple[str, ...]) -> None:
    """Print the table."""
    table = Table("devices", "way", "step, ms", "exposed, ms", "collectives", box=None)
    for count in devices:
        for way in WAYS:
            given = (f"model.options.num_layers={layers}", f"train.seq_len={seq_len}", *overrides)
            timeline, traces = simulated(way, count, given)
            exposed_s = decompose(timeline).dp_communication_s
            table.add_row(
                str(count),
                way,
                f"{timeline.step_s * 1e3:.2f}",
                f"{exposed_s * 1e3:.2f}",
                str(num_collectives(traces)),
            )
    Console().print(table)


def simulated(way: str, num_devices: int, given: tuple[str, ...]) -> tuple[Timeline, Traces]:
    """Return the step of one way on `num_devices`, one sequence on each."""
    build, compiled = WAYS[way]
    keys = (
        f"layout.compile={compiled}",
        f"layout.dp_shard={num_devices}",
        "layout.reshard_after_forward=auto",
        "train.global_batch_tokens=none",
        f"train.global_batch_size={num_devices}",
        f"cluster.num_devices={num_devices}",
    )
    # The cache of traces does not know one builder from another.
    how = TraceOptions(use_cache=False, verify=0)
    traces = trace_job(build, load_job(JOB, (*keys, *given)), how=how)
    return simulate(traces, load_cluster(CLUSTER).with_num_devices(num_devices)), traces


def num_collectives(traces: Traces) -> int:
    """Return the collectives that a rank takes part in."""
    trace = next(iter(traces.traces.values()))
    return int((trace.records.kind == RecordKind.COLLECTIVE).sum())


def step_before(device: torch.device, rank: int, world_size: int, job: str, folder: str) -> Callable[[], None]:
    """Return the trainer's step with graphs as they are before the pass."""
    _leave_graphs()
    return build_step.build_step(device, rank, world_size, job, folder)


def part_before(
    device: torch.device, rank: int, world_size: int, microbatches: str, job: str, folder: str
) -> Callable[[], None]:
    """Return the same of some microbatches."""
    _leave_graphs()
    return build_step.build_part_of_step(device, rank, world_size, microbatches, job, folder)


def _leave_graphs() -> None:
    def unchanged(buckets: Buckets, graph: fx.Graph) -> None:
        pass

    Buckets.__call__ = unchanged  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    sys.exit(main())
