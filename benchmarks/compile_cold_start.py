"""python -m benchmarks.compile_cold_start: first step of 32 layers: eager, compiled block by block, compiled whole.

Each way runs in a process of its own, `--rounds` times in turn, with an empty folder for Inductor's code and one thread
that compiles: the model's construction, then one forward and backward of a whole Llama on one process. What compiling
adds is the first step less a later one. `blocks, cached` starts from what `blocks` has left in that folder.

Expected, written down before measuring: blocks 20 s, of which 12 s are what the first compilation of a process takes,
and the whole model 80 s; 4 times less or better, which is the bar. From the folder, 5 s.

`--way model --layers N` measures one way at another depth. Expected of `model`, before measuring: a line through the
33.5 s of one block and the 169 s of 32, so 47 s at 4 layers, 64 s at 8 and 99 s at 16 (CPU seconds).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from meshwright.models.build import build_architecture
from meshwright.parallelism.data.materialize import materialize
from meshwright.parallelism.torch_private.torch_compile_count import compile_count
from meshwright.parallelism.torch_private.torch_compiler import trust_vector_instructions
from meshwright.spec.model.architecture import LlamaArchitecture

WAYS = ("eager", "blocks", "blocks, cached", "model")
BAR = 4.0
"""Least ratio of the whole model's compilation to that of its blocks."""
BATCH, SEQ_LEN = 2, 64
MODEL = LlamaArchitecture(
    vocab_size=512, dim=128, num_layers=32, num_heads=4, num_kv_heads=2, head_dim=32, ffn_dim=384, max_seq_len=SEQ_LEN
)


def main() -> int:
    """Print the table; return 0 if the bar is met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--way", action="append", choices=WAYS, help="default: all")
    parser.add_argument("--layers", type=int, default=MODEL.num_layers)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.layers)))
        return 0
    ways = [way for way in WAYS if way in (arguments.way or WAYS)]
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as folder:
            for way in ways:
                found[way].append(_measured_alone(way, arguments.layers, Path(folder)))
    table = Table("way", "graphs", "first step, s", "later step, s", "compiling, s", "compiling, CPU-s", box=None)
    median = {way: {key: statistics.median(row[key] for row in rows) for key in rows[0]} for way, rows in found.items()}
    for way, row in median.items():
        times = (f"{row[key]:.2f}" for key in ("first_s", "later_s", "added_s", "added_cpu_s"))
        table.add_row(way, f"{row['graphs']:.0f}", *times)
    Console().print(table)
    if not {"model", "blocks"} <= median.keys():
        return 0
    ratio = median["model"]["added_cpu_s"] / median["blocks"]["added_cpu_s"]
    print(f"the whole model takes {ratio:.1f} times as long to compile as its blocks (bar: {BAR:g})")
    return 0 if ratio >= BAR else 1


def _measured_alone(way: str, num_layers: int, folder: Path) -> dict[str, float]:
    """Return what `measure` finds in a process of its own; blocks share a folder, in order."""
    cache = folder / way.split(",")[0]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.compile_cold_start", "--measure", way]
    command += ["--layers", str(num_layers)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(way: str, num_layers: int) -> dict[str, float]:
    """Return the first and a later step's wall seconds, what the first takes longer, and the number of graphs."""
    architecture = MODEL.replace(num_layers=num_layers)
    torch.set_num_threads(1)
    # As ranks do before they compile.
    trust_vector_instructions()
    torch.manual_seed(0)
    with torch.device("meta"):
        model = build_architecture(architecture)
    materialize(model, "cpu", seed=1)
    if way == "model":
        model.compile(fullgraph=True)
    elif way != "eager":
        for block in model.blocks:
            block.compile(fullgraph=True)
    tokens_BS = torch.randint(0, MODEL.vocab_size, (BATCH, SEQ_LEN))

    def step() -> tuple[float, float]:
        start_s, start_cpu_s = time.perf_counter(), _cpu_s()
        model(tokens_BS).square().mean().backward()
        return time.perf_counter() - start_s, _cpu_s() - start_cpu_s

    first_s, first_cpu_s = step()
    later = [step() for _ in range(5)]
    later_s, later_cpu_s = (statistics.median(one[part] for one in later) for part in (0, 1))
    return {
        "graphs": compile_count().num_graphs,
        "first_s": first_s,
        "later_s": later_s,
        "added_s": first_s - later_s,
        "added_cpu_s": first_cpu_s - later_cpu_s,
    }


def _cpu_s() -> float:
    """Return the CPU seconds of this process and of the compilers that it started and that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


if __name__ == "__main__":
    sys.exit(main())
