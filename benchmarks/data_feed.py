"""python -m benchmarks.data_feed: what a loader feeds next to what a tiny run consumes, and the memory that it takes.

Expected, written down before measuring: a window is a slice of a memory map, some 10 us for 256 tokens, so that one
thread feeds 10 million tokens/s, a hundred times what a million parameters on one core consume (about 0.1 million). A
worker pickles and copies, so that one feeds half of that, and two no more, since the loader's thread stacks what they
send. Memory does not depend on the corpus: pages of the map are the kernel's. The bars: 20 times the run, and growth of
private memory, from before the cached tokens are opened, within 8 MiB of each other at 1x and 10x of the corpus.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from meshwright.data.dataset import build_dataset
from meshwright.data.open_loader import open_loader
from meshwright.data.order import Share
from meshwright.spec.job.job import Job
from meshwright.spec.job.sections import DataSection, TrainSection

_BAR_RATIO = 20.0
_BAR_BYTES = 8 << 20
_SEQ_LEN = 256
_BATCH_SIZE = 16
_CORPUS_BYTES = 16_000_000
_SECONDS = 4.0


def main() -> int:
    """Return the exit code: 0 if every row keeps both bars."""
    consumed = _consumed_tokens_per_s()
    table = Table("corpus", "workers", "tokens/s fed", "of the run", "memory growth, MiB", "with pages, MiB", box=None)
    keeps, growth = True, dict[tuple[int, int], int]()
    with tempfile.TemporaryDirectory() as folder:
        for times in (1, 10):
            corpus = Path(folder, f"{times}x.txt")
            _write(corpus, times * _CORPUS_BYTES)
            build_dataset(_section(corpus, 0), _SEQ_LEN)
            for num_workers in (0, 1, 2):
                command = [sys.executable, "-m", "benchmarks.data_feed", str(corpus), str(num_workers)]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                found = json.loads(done.stdout)
                growth[times, num_workers] = found["private_bytes"]
                ratio = found["tokens_per_s"] / consumed
                keeps = keeps and ratio >= _BAR_RATIO
                mib = [f"{found[key] / 2**20:.1f}" for key in ("private_bytes", "rss_bytes")]
                table.add_row(f"{times}x", str(num_workers), f"{found['tokens_per_s']:,.0f}", f"{ratio:,.0f}x", *mib)
    keeps = keeps and all(abs(growth[1, count] - growth[10, count]) <= _BAR_BYTES for count in (0, 1, 2))
    console = Console()
    console.print(f"examples/tiny.toml consumes {consumed:,.0f} tokens/s on one rank")
    console.print(table)
    return 0 if keeps else 1


def _consumed_tokens_per_s() -> float:
    with tempfile.TemporaryDirectory() as folder:
        words = (f"run.dir={folder}/run", "train.steps=30", "train.validation_interval=0", "run.device=cpu")
        command = [sys.executable, "-m", "meshwright", "train", "examples/tiny.toml", *words, "checkpoint.interval=0"]
        subprocess.run(command, check=True, capture_output=True)
        rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    rates = sorted(row["tokens_per_s"] for row in rows if row.get("tokens_per_s") and row["step"] > 5)
    return float(rates[len(rates) // 2])


def _write(corpus: Path, num_bytes: int) -> None:
    line = "".join(f"{number} times {number} is {number * number}; " for number in range(4000)) + "\n"
    corpus.write_text(line * (num_bytes // len(line) + 1))


def feed(corpus: Path, num_workers: int) -> None:
    """Print what a loader of `corpus` feeds for a few seconds, as JSON: tokens/s and growth of memory in bytes."""
    before = _memory_bytes()
    section = _section(corpus, num_workers)
    dataset = build_dataset(section, _SEQ_LEN)
    share = Share(_BATCH_SIZE, 2)
    loader = open_loader(dataset, share, Job(data=section, train=TrainSection(seq_len=_SEQ_LEN, seed=0)))
    loader.microbatches(0)
    start_s, step = time.perf_counter(), 0
    while time.perf_counter() - start_s < _SECONDS:
        step += 1
        loader.microbatches(step)
    took_s, after = time.perf_counter() - start_s, _memory_bytes()
    loader.close()
    private, resident = (late - early for early, late in zip(before, after, strict=True))
    rate = step * _BATCH_SIZE * _SEQ_LEN / took_s
    print(json.dumps({"tokens_per_s": rate, "private_bytes": private, "rss_bytes": resident}))


def _section(corpus: Path, num_workers: int) -> DataSection:
    cache_dir, num_bytes = str(corpus.parent / "cache"), corpus.stat().st_size
    return DataSection(source=str(corpus), cache_dir=cache_dir, max_bytes=num_bytes, num_workers=num_workers)


def _memory_bytes() -> tuple[int, int]:
    """Return this process's private memory, and all of its resident memory, which has pages of mapped files, too."""
    status = Path("/proc/self/status").read_text()
    sizes = {key: int(size) << 10 for key, size in re.findall(r"^(RssAnon|VmRSS):\s+(\d+) kB", status, re.MULTILINE)}
    return sizes["RssAnon"], sizes["VmRSS"]


if __name__ == "__main__":
    if len(sys.argv) == 3:
        feed(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        sys.exit(main())
