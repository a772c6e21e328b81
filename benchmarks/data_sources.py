"""CPU time and memory of reading sources, of leaving out copies, and of a mixture's schedule: run as a module.

Expected before the first run: any format of documents reads above 50 MB/s of text and takes less than 100 MB of memory
whatever its size; a batch of 1,024 samples of 22 sources is located in 10 ms; 10 us and 22 bytes for each hash.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.resident import Peak
from meshwright.data.filtering.document_hashes import DocumentHashes
from meshwright.data.mixing.mixture_order import MixtureOrder
from meshwright.data.mixing.mixture_schedule import MixtureSchedule
from meshwright.data.sources import pieces
from meshwright.spec.job.sections import DataSection

_WORDS = ["the", "model", "reads", "each", "document", "once", "and", "then", "another", "one", "of", "the", "corpus"]
_NUM_SOURCES = 22
_BATCH = 1024


def main() -> None:
    """Print one row for each format, then the schedule and the hashes."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--megabytes", type=int, default=200, help="text of each format")
    options.add_argument("--hashes", type=int, default=1_000_000)
    chosen = options.parse_args()
    print("| format | MB/s of text | with deduplicate | memory |")
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, write in _FORMATS.items():
            path = Path(folder, name)
            write(path, _texts(chosen.megabytes * 1_000_000))
            _measure_format(path)
            path.unlink()
    _measure_schedule()
    _measure_hashes(chosen.hashes)


def _texts(num_bytes: int) -> list[str]:
    generator = np.random.default_rng(0)
    found: list[str] = []
    while num_bytes > 0:
        found.append(" ".join(generator.choice(_WORDS, 500)))
        num_bytes -= len(found[-1])
    return found


def _json_lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def _write_tar(path: Path, texts: list[str]) -> None:
    with tarfile.open(path, "w") as archive:
        for number, text in enumerate(texts):
            member = tarfile.TarInfo(f"{number}.json")
            data = json.dumps({"text": text}).encode()
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def _write_arrow(path: Path, texts: list[str]) -> None:
    table = pa.table({"text": texts})
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)


_FORMATS: dict[str, Callable[[Path, list[str]], object]] = {
    "a.jsonl": lambda path, texts: path.write_bytes(_json_lines(texts)),
    "a.jsonl.gz": lambda path, texts: path.write_bytes(gzip.compress(_json_lines(texts), 6)),
    "a.jsonl.zst": lambda path, texts: path.write_bytes(pa.compress(_json_lines(texts), "zstd", asbytes=True)),
    "a.tar": _write_tar,
    "a.arrow": _write_arrow,
    "a.parquet": lambda path, texts: pq.write_table(pa.table({"text": texts}), path, row_group_size=10_000),
}


def _measure_format(path: Path) -> None:
    section = DataSection(source=str(path), max_bytes=10**12)
    num_bytes, plain_s, memory_bytes = _read(section)
    _, unique_s, _ = _read(section.replace(deduplicate=True))
    rates = (f"{num_bytes / seconds / 1e6:.0f}" for seconds in (plain_s, unique_s))
    print(f"| {path.name} | {' | '.join(rates)} | {memory_bytes / 1e6:.0f} MB |")


def _read(section: DataSection) -> tuple[int, float, int]:
    """Return the bytes of text, the CPU seconds, and the memory at the peak above that before."""
    num_bytes, start_s, peak = 0, time.process_time(), Peak()
    for piece in pieces(section):
        num_bytes += len(piece.utf8)
    return num_bytes, time.process_time() - start_s, peak.above_start()


def _measure_schedule() -> None:
    weights = [1 + number**2 for number in range(_NUM_SOURCES)]
    names = [str(number) for number in range(_NUM_SOURCES)]
    schedule = MixtureSchedule(weights)
    order = MixtureOrder(names, [10**6] * _NUM_SOURCES, [(0, schedule)], seed=0, shuffle=True)
    rounds, start_s = 20, time.process_time()
    for step in range(rounds):
        order.samples_at(np.arange(_BATCH) + (10**9 + step) * _BATCH)
    each_ms = (time.process_time() - start_s) / rounds * 1e3
    print(f"{_BATCH} samples of {_NUM_SOURCES} sources: {each_ms:.2f} ms; bound {max(schedule.max_error):.2f} samples")


def _measure_hashes(number: int) -> None:
    seen, start_s = DocumentHashes(), time.process_time()
    for value in range(number):
        seen.add((value * 0x9E3779B97F4A7C15 % 2**64).to_bytes(8) * 2)
    print(f"{number} hashes: {(time.process_time() - start_s) / number * 1e6:.1f} us each")


if __name__ == "__main__":
    main()
