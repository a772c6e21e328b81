"""python -m benchmarks.checkpoints.scale: what does one rank of 1,024 hold, send and write for a checkpoint of 405B?

1. The shards of llama3.1-405b with AdamW under FSDP on 1,024 ranks, without their data: the claims that a judge gets
   and how long it takes, a rank's manifest, the index, and what one file of everything (format 1) would be.
2. 1,024 writers, one after the other in this process, save 16 small tensors for real; one process loads them.

Expected, written before the first run: a manifest of 0.5 MB, an index of 0.1 MB, a judge in 0.2 s; format 1 500 MB.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from meshwright.checkpoint.checkpoint import load
from meshwright.checkpoint.format.boxes import Box
from meshwright.checkpoint.format.manifest import RankManifest, StoredShard, StoredTensor, read_index
from meshwright.checkpoint.saving import SaveRequest, extents_of, with_bytes, write_checkpoint
from meshwright.checkpoint.shards import Claim, Shard, judge_claims, judge_of
from meshwright.models.build import build_model
from meshwright.spec.job.sections import ModelSection
from meshwright.units import format_bytes

NUM_RANKS = 1024


def main() -> int:
    """Print what was measured."""
    shapes = state_shapes()
    table = Table("what", "measured", title=f"{len(shapes):,} tensors of llama3.1-405b on {NUM_RANKS:,} ranks")
    of_rank = [shards_of(shapes, rank) for rank in (0, NUM_RANKS // 2, NUM_RANKS - 1)]
    manifests = [len(manifest(rank, shards).model_dump_json()) for rank, shards in enumerate(of_rank)]
    table.add_row("manifest of a rank", format_bytes(max(manifests)))
    table.add_row("all in one file, as format 1", format_bytes(NUM_RANKS * max(manifests)))
    claims = claims_of(shapes, judge=0)
    started_s = time.perf_counter()
    _, problems = judge_claims(claims)
    assert not problems
    table.add_row("claims that a judge gets", f"{sum(map(len, claims)):,}")
    table.add_row("a judge's time", f"{time.perf_counter() - started_s:.2f} s")
    # In memory: here one disk would flush the files of all ranks, one after the other.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        seconds, index = save_and_load_for_real(
            Path(folder) / "step-1", [name for name in shapes if "/exp" not in name][:16]
        )
    table.add_row("index of 1,024 ranks", format_bytes(index))
    table.add_row("1,024 writers of a small state, loaded by one process, equal", f"{seconds:.1f} s")
    Console().print(table)
    return 0


def state_shapes() -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a training state, by full name."""
    with torch.device("meta"):
        model = build_model(ModelSection(source="llama3.1-405b"))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    state = {f"model/{name}": shape for name, shape in shapes.items()}
    for moment in ("exp_avg", "exp_avg_sq"):
        state |= {f"optimizer/{name}/{moment}": shape for name, shape in shapes.items()}
    return state


def shards_of(shapes: dict[str, tuple[int, ...]], rank: int) -> list[Shard]:
    """Return the shards of `rank`, sharded in dim 0, on the meta device."""
    shards = []
    for name, shape in shapes.items():
        start, rows = rows_of(shape[0], rank)
        box = Box((start,) + (0,) * (len(shape) - 1), (rows, *shape[1:]))
        shards.append(Shard(name, "float32", shape, box, torch.empty(box.shape, device="meta")))
    return shards


def rows_of(num_rows: int, rank: int) -> tuple[int, int]:
    """Return first row and number of rows of a rank, as torch.chunk divides."""
    size = -(-num_rows // NUM_RANKS)
    start = min(num_rows, rank * size)
    return start, min(size, num_rows - start)


def manifest(rank: int, shards: list[Shard]) -> RankManifest:
    """Return the manifest of a rank, with made-up hashes."""
    tensors = {shard.name: StoredTensor(dtype=shard.dtype, shape=shard.shape, shards=[]) for shard in shards}
    start = 0
    for extent in extents_of(shards):
        tensors[extent.name].shards.append(
            StoredShard(
                offsets=extent.box.offsets,
                shape=extent.box.shape,
                start=start,
                num_bytes=extent.num_bytes,
                xxh3_128="0" * 32,
            )
        )
        start += extent.num_bytes
    return RankManifest(save_id="0" * 32, rank=rank, num_bytes=start, tensors=tensors)


def claims_of(shapes: dict[str, tuple[int, ...]], judge: int) -> list[list[Claim]]:
    """Return what all ranks send to one judge."""
    own = {name: shape for name, shape in shapes.items() if judge_of(name, NUM_RANKS) == judge}
    return [
        [Claim(shard.name, shard.dtype, shard.shape, shard.box, 4 * shard.box.numel) for shard in shards_of(own, rank)]
        for rank in range(NUM_RANKS)
    ]


class _Written(BaseException):
    """Ends a rank that has written its part: what rank 0 publishes last comes after all ranks have."""


class FakePeers:
    """1,024 ranks one after the other: rank 0, where it collects, lets each of the others write."""

    def __init__(self, rank: int, written: dict[int, Any], write: Callable[[int], None]) -> None:
        self.rank, self.num_ranks = rank, NUM_RANKS
        self._written, self._write = written, write

    def publish(self, value: Any) -> Any:
        """Return what rank 0 published: the temporary folder."""
        return self._written.setdefault(-1, value) if self.rank == 0 else self._written[-1]

    def collect(self, value: Any) -> list[Any]:
        """Return the values of all ranks on rank 0."""
        self._written[self.rank] = value
        if self.rank != 0:
            raise _Written
        for rank in range(1, NUM_RANKS):
            with suppress(_Written):
                self._write(rank)
        del self._written[-1]
        return [self._written[rank] for rank in range(NUM_RANKS)]


def save_and_load_for_real(folder: Path, names: list[str]) -> tuple[float, int]:
    """Save 2,048 x 8 elements under each name with 1,024 writers, and load; return seconds and bytes of the index."""
    whole = {name: torch.randn(2048, 8) for name in names}
    written: dict[int, Any] = {}

    def write(rank: int) -> None:
        own = [_rows(name, tensor, rank) for name, tensor in whole.items()]
        tensors = {shard.name: (shard.dtype, shard.shape) for shard in own}
        request = SaveRequest(folder, {"step": 1}, ["model"], tensors)
        write_checkpoint(request, with_bytes(own), FakePeers(rank, written, write))

    started_s = time.perf_counter()
    write(0)
    state = {"model": {name.removeprefix("model/"): torch.zeros_like(tensor) for name, tensor in whole.items()}}
    load(folder, state)
    assert all(torch.equal(state["model"][name.removeprefix("model/")], tensor) for name, tensor in whole.items())
    assert len(read_index(folder).ranks) == NUM_RANKS
    return time.perf_counter() - started_s, (folder / "checkpoint.json").stat().st_size


def _rows(name: str, tensor: Tensor, rank: int) -> Shard:
    start, rows = rows_of(len(tensor), rank)
    return Shard(
        name, "float32", tuple(tensor.shape), Box((start, 0), (rows, tensor.shape[1])), tensor[start : start + rows]
    )


if __name__ == "__main__":
    sys.exit(main())
