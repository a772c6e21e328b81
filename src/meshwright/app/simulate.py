"""simulate: a job's own step, or a program's, traced for all of its ranks and simulated on a cluster; needs torch."""

import time
from collections.abc import Callable
from typing import Any

from meshwright.app.arguments import JobSource, NotNegative, Positive, checked
from meshwright.app.named_options import option_words
from meshwright.app.progress import elapsed
from meshwright.app.results.result import viewed
from meshwright.app.results.simulation_result import Simulation, TimelineResult
from meshwright.app.simulated.run_traces import simulate_traces
from meshwright.app.simulated.simulate_target import conditions_of, trace_of_job, trace_of_program
from meshwright.config.load import ResolvedJob
from meshwright.garbage import kept_garbage
from meshwright.simulator.engine.rank_classes import split_classes
from meshwright.spec.trace.traces import Traces


@checked
def simulate(
    job: JobSource | None = None,
    *overrides: str,
    model: str | None = None,
    seq_len: Positive | None = None,
    global_batch_tokens: int | str | None = None,
    global_batch_size: Positive | None = None,
    cluster: str | None = None,
    build: str | None = None,
    ranks: Positive | None = None,
    every_rank: bool = False,
    routing: str = "balanced",
    jitter: float = 0.0,
    slow_rank: str | tuple[str, ...] | list[str] = (),
    seed: NotNegative = 0,
    use_cache: bool = True,
) -> Simulation:
    """Return what the step of `job` would do on `cluster` ("NAME:COUNT"; None for the job's).

    In place of a job, `model` names a preset or a config.json, with a sequence length and a batch as for `plan`, which
    chooses its layout and keeps overrides such as "layout.tp=8".
    `build` names a program in place of a job, "FILE.py:FUNCTION", and `ranks` how many it has; `every_rank` traces all
    of them. `routing` is how tokens are spread over experts, `jitter` the spread of each operation's time drawn with
    `seed`, `slow_rank` ranks that compute slower ("3:1.5"). Raises ConfigError before anything is traced for what
    cannot be simulated.
    """
    given: dict[str, Any] = {
        "model": model,
        "seq_len": seq_len,
        "global_batch_tokens": global_batch_tokens,
        "global_batch_size": global_batch_size,
        "cluster": cluster,
        "build": build,
        "ranks": ranks,
        "every_rank": every_rank,
        "routing": routing,
        "jitter": jitter,
        "slow_rank": (slow_rank,) if isinstance(slow_rank, str) else slow_rank,
        "seed": seed,
        "no_cache": not use_cache,
    }
    if isinstance(job, str) and "=" in job:
        overrides, job = (job, *overrides), None
    if isinstance(job, ResolvedJob):
        overrides = (*job.overrides, *overrides)
        job = job.path
    return simulated((*([] if job is None else [str(job)]), *overrides), given)


def simulated(
    words: tuple[str, ...], given: dict[str, Any], traced: Callable[[Traces, float], None] = lambda *_: None
) -> Simulation:
    """Return the simulation of what a command line says; `traced` is called with the traces and their seconds."""
    conditions, start_s = conditions_of(given), time.monotonic()
    with option_words(given["model"] is not None, words):
        subject, traces = (trace_of_program if given["build"] else trace_of_job)(words, given, conditions)
    conditions = conditions if subject.layout is None else conditions.under(subject.layout)
    traced(traces, time.monotonic() - start_s)
    with elapsed("checking and simulating"), kept_garbage():
        traces = split_classes(traces, [fault.rank for fault in conditions.faults])
        run, timeline = simulate_traces(subject, traces, conditions)
    return Simulation(run, None if timeline is None else viewed(TimelineResult, timeline), traces)
