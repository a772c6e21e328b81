"""python -m benchmarks.trace_time [CASE...]: how long tracing a job takes, process start included, and what memory.

Expected, written down before measuring: 5 s of CPU time for importing torch and building, 1 ms for each record that is
traced, of two steps with four microbatches; so 10 s for a model without a pipeline and 30 s for 405B on 16,384, whose
first, last and one of fourteen equal pipeline ranks are traced. The bar is 60 s on two cores, 2 GiB, for the largest.
CPU time is what all processes computed; memory is the most that one of them held, of which at most three run at a time.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from meshwright.config.load import load_job
from meshwright.tracer.trace_job import TraceOptions, trace_job
from meshwright.trainer.step.step_builder import TRAINER_STEP

_BAR_S = 120.0
_BAR_GIB = 2.0
_NUM_PROCESSES = 3


@dataclass(frozen=True)
class Case:
    """A job of examples/, on other ranks."""

    job: str
    overrides: tuple[str, ...]


def _case(job: str, num_ranks: int, sequences: int, **degrees: int) -> Case:
    keys = {"dp_replicate": 1, "dp_shard": 1, "tp": 1, "pp": 1} | degrees
    layout = (f"layout.{name}={value}" for name, value in keys.items())
    return Case(job, (f"cluster.num_devices={num_ranks}", f"train.global_batch_tokens={sequences * 8192}", *layout))


CASES = {
    "8B:8": _case("llama3-8b", 8, 128, dp_shard=8),
    "8B:1024": _case("llama3-8b", 1024, 1024, dp_replicate=16, dp_shard=64),
    "8B:16384": _case("llama3-8b", 16384, 16384, dp_replicate=256, dp_shard=64),
    "70B:8": _case("llama3-70b", 8, 128, dp_shard=8),
    "70B:1024": _case("llama3-70b", 1024, 2048, dp_shard=128, tp=8),
    "70B:16384": _case("llama3-70b", 16384, 4096, dp_replicate=16, dp_shard=128, tp=8),
    "405B:8": _case("llama3-405b-16k", 8, 32, tp=8),
    "405B:1024": _case("llama3-405b-16k", 1024, 512, dp_shard=16, tp=8, pp=8),
    "405B:16384": _case("llama3-405b-16k", 16384, 4096, dp_shard=128, tp=8, pp=16),
}


def main() -> int:
    """Return the exit code: 0 if every case keeps its bar."""
    chosen = sys.argv[1:] or list(CASES)
    table = Table("job:ranks", "classes", "records", "wall, s", "CPU, s", "each process, MiB", box=None)
    keeps = True
    for name in chosen:
        command = [sys.executable, "-c", f"from benchmarks.trace_time import one; one({name!r})"]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        keeps = keeps and found["cpu_s"] <= _BAR_S and _NUM_PROCESSES * found["mib"] <= _BAR_GIB * 1024
        numbers = (f"{found[key]:,.0f}" for key in ("classes", "records", "wall_s", "cpu_s", "mib"))
        table.add_row(name, *numbers)
    Console().print(table)
    return 0 if keeps else 1


def one(name: str) -> None:
    """Print what tracing one case took, as JSON."""
    case = CASES[name]
    start = time.perf_counter()
    # Compiled blocks take the compiler's own time.
    overrides = [*case.overrides, "layout.compile=false"]
    traces = trace_job(
        TRAINER_STEP, load_job(f"examples/{case.job}.toml", overrides), how=TraceOptions(use_cache=False)
    )
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(
        json.dumps(
            {
                "classes": len(traces.traces),
                "records": sum(len(trace.records) for trace in traces.traces.values()),
                "wall_s": time.perf_counter() - start,
                "cpu_s": sum(one.ru_utime + one.ru_stime for one in usage),
                "mib": max(one.ru_maxrss for one in usage) / 1024,
            }
        )
    )


if __name__ == "__main__":
    sys.exit(main())
