"""Tokenising ahead of training next to the tokenizers library by itself: run as a module.

A corpus of JSONL is made of Python's own library, and a byte-level BPE of 16,000 tokens is trained on it. Each round
tokenises the corpus in all ways, each in a process of its own: time is from the first call to the last byte written.
With --memory, the peak resident memory of preparation for a corpus and for one ten times as large.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.resident import Peak
from meshwright.data.cache import content
from meshwright.data.cache.token_cache import TokenCache
from meshwright.data.sources import list_files
from meshwright.data.tokenizer import load_tokenizer
from meshwright.spec.job.sections import DataSection

_VOCAB_SIZE = 16_000
_SHARD_PART_BYTES = 2 * 2**20


def write_corpus(path: Path, num_copies: int) -> int:
    """Write the standard library `num_copies` times, a document each file, and return the bytes of text."""
    num_bytes = 0
    with path.open("w", encoding="utf-8") as file:
        for copy in range(num_copies):
            for module in _modules():
                text = f"# copy {copy}\n{module}"
                num_bytes += len(text.encode())
                file.write(json.dumps({"text": text}) + "\n")
    return num_bytes


def train_tokenizer(path: Path) -> None:
    """Write a tokenizer.json of a byte-level BPE that is trained on the standard library."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_modules(), trainer)
    tokenizer.save(str(path))


def _modules() -> Iterator[str]:
    """Yield the text of each module of the standard library."""
    for file in list_files(DataSection()):
        assert isinstance(file, Path)
        yield file.read_text(encoding="utf-8")


def encode_only(folder: Path) -> None:
    """Let the library encode all texts, which are in memory, in one call, and drop what it returns."""
    texts, tokenizer = _library(folder)
    with timed():
        tokenizer.encode_batch_fast(texts, add_special_tokens=False)


def library_to_file(folder: Path) -> None:
    """Do what a user of the library does: read the texts, encode them in one call, write their ids."""
    _, tokenizer = _library(folder)
    with timed(), (folder / "library.bin").open("wb") as file:
        with (folder / "corpus.jsonl").open(encoding="utf-8") as corpus:
            texts = [json.loads(line)["text"] for line in corpus]
        for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            file.write(np.array(encoding.ids, dtype=np.uint16).tobytes())


def prepare(folder: Path, tokenizer_source: str | None = None) -> None:
    """Fill an empty token cache, with hash, checksums and parts."""
    with tempfile.TemporaryDirectory(dir=folder) as cache_dir:
        section = _section(folder, cache_dir)
        section = section.replace(tokenizer=tokenizer_source or section.tokenizer)
        tokenizer = load_tokenizer(section.tokenizer)
        with timed():
            TokenCache(section, tokenizer).tokens()


def prepare_in_processes(folder: Path) -> None:
    """Fill an empty token cache by one process a core, each with one thread of the library, and join the parts."""
    content.PART_BYTES = _SHARD_PART_BYTES
    num_shards = os.cpu_count() or 1
    with tempfile.TemporaryDirectory(dir=folder) as cache_dir:
        section = _section(folder, cache_dir)
        tokenizer = load_tokenizer(section.tokenizer)
        with timed():
            TokenCache(section, tokenizer)
            environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
            command = [sys.executable, "-m", "benchmarks.prepare", "--way", "shard", "--folder", str(folder)]
            shards = [
                subprocess.Popen([*command, "--shard", f"{i}/{num_shards}", "--cache", cache_dir], env=environment)
                for i in range(num_shards)
            ]
            codes = [shard.wait() for shard in shards]
            assert not any(codes), codes
            TokenCache(section, tokenizer).tokens()


def shard(folder: Path, cache_dir: str, place: str) -> None:
    """Make one share of the parts."""
    content.PART_BYTES = _SHARD_PART_BYTES
    section = _section(folder, cache_dir)
    index, count = map(int, place.split("/"))
    cache = TokenCache(section, load_tokenizer(section.tokenizer))
    cache.build_parts(range(index, len(cache.content.parts), count))


def prepare_bytes(folder: Path) -> None:
    """Fill an empty token cache with bytes, in which reading, hashing and writing take the time."""
    prepare(folder, "bytes")


WAYS: dict[str, Callable[[Path], None]] = {
    "library, encode only": encode_only,
    "library, file to file": library_to_file,
    "prepare": prepare,
    "prepare, 1 process a core": prepare_in_processes,
}


@contextmanager
def timed() -> Iterator[None]:
    """Print how long the block took, the processor time of this process and those it ended, and the peak memory."""
    peak, start, start_s = Peak(), os.times(), time.perf_counter()
    yield
    wall_s, end = time.perf_counter() - start_s, os.times()
    cpu_s = sum(end[:4]) - sum(start[:4])
    print(json.dumps({"wall_s": wall_s, "cpu_s": cpu_s, "peak_bytes": peak.above_start()}), flush=True)


def _library(folder: Path) -> tuple[list[str], Any]:
    with (folder / "corpus.jsonl").open(encoding="utf-8") as corpus:
        texts = [json.loads(line)["text"] for line in corpus]
    return texts, Tokenizer.from_file(str(folder / "tokenizer.json"))


def _section(folder: Path, cache_dir: str) -> DataSection:
    return DataSection(
        source=str(folder / "corpus.jsonl"),
        tokenizer=str(folder / "tokenizer.json"),
        cache_dir=cache_dir,
        max_bytes=2**50,
    )


def _run(folder: Path, way: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.prepare", "--way", way, "--folder", str(folder)]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    found: dict[str, float] = json.loads(lines[-1])
    return found


def compare(folder: Path, num_copies: int, num_rounds: int) -> None:
    """Print a row for each way: medians over rounds, and of the ratios to the library within a round."""
    num_bytes = write_corpus(folder / "corpus.jsonl", num_copies)
    rounds = []
    for number in range(num_rounds):
        rounds.append({way: _run(folder, way) for way in WAYS})
        words = ", ".join(
            f"{way} {found['wall_s']:.1f} s ({found['cpu_s']:.2f} of CPU)" for way, found in rounds[-1].items()
        )
        print(f"round {number + 1}: {words}", file=sys.stderr, flush=True)
    print(f"{num_bytes / 1e6:.1f} MB of text, {num_rounds} rounds")
    print("| way | MB/s | MB a CPU second | of encode only | of file to file | the same by CPU time | | peak memory |")
    print("|---|---|---|---|---|---|---|---|")
    for way in WAYS:
        rates = [num_bytes / 1e6 / statistics.median(one[way][key] for one in rounds) for key in ("wall_s", "cpu_s")]
        ratios = [
            statistics.median(one[other][key] / one[way][key] for one in rounds)
            for key in ("wall_s", "cpu_s")
            for other in ("library, encode only", "library, file to file")
        ]
        peak = max(one[way]["peak_bytes"] for one in rounds) / 2**20
        figures = " | ".join(f"{figure:.2f}" for figure in (*rates, *ratios))
        print(f"| {way} | {figures} | {peak:.0f} MiB |", flush=True)


def memory(folder: Path, num_copies: int) -> None:
    """Print the peak memory of preparation, by bytes, for `num_copies` and for ten times as many."""
    for copies in (num_copies, 10 * num_copies):
        num_bytes = write_corpus(folder / "corpus.jsonl", copies)
        found = _run(folder, "bytes")
        rate = f"{num_bytes / 1e6 / found['cpu_s']:.0f} MB a CPU second"
        print(f"{num_bytes / 1e6:.0f} MB: {found['peak_bytes'] / 2**20:.0f} MiB above the start, {rate}", flush=True)


def main() -> None:
    """Measure, or be one of the processes that are measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--copies", type=int, default=2, help="copies of the standard library, 12 MB each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", action="store_true")
    for hidden in ("--way", "--folder", "--shard", "--cache"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way == "shard":
        shard(Path(given.folder), given.cache, given.shard)
    elif given.way:
        (WAYS | {"bytes": prepare_bytes})[given.way](Path(given.folder))
    else:
        with tempfile.TemporaryDirectory() as name:
            train_tokenizer(Path(name, "tokenizer.json"))
            (memory if given.memory else compare)(Path(name), given.copies, *([] if given.memory else [given.rounds]))


if __name__ == "__main__":
    main()
