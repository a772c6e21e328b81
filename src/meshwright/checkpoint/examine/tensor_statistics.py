"""detail_of: a stored tensor's shards and statistics, one shard in memory at a time."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from meshwright.checkpoint.examine.contents import find_tensor, places_of, summary_of
from meshwright.checkpoint.format.dtypes import torch_dtype
from meshwright.checkpoint.format.saved import Saved
from meshwright.checkpoint.loading import open_data, read_verified
from meshwright.spec.run.checkpoint_findings import TensorDetail, TensorStatistics


def detail_of(folder: Path, name: str) -> TensorDetail:
    """Return the tensor `name` of a checkpoint; raises DamagedCheckpoint where its bytes are not those saved."""
    parts = find_tensor(folder, name)
    shards = (read_shard(folder, part) for part in parts if part.shard is not None)
    return TensorDetail(
        folder=str(folder), tensor=summary_of(parts), shards=places_of(parts), statistics=statistics_of(shards)
    )


def read_shard(folder: Path, saved: Saved) -> Tensor:
    """Return a stored shard as a tensor of its box's shape, verified by its hash."""
    assert saved.shard is not None
    buffer = torch.empty(saved.shard.num_bytes, dtype=torch.uint8)
    with open_data(folder, saved.rank) as file:
        read_verified(file, folder, saved, buffer.numpy().data)
    return buffer.view(torch_dtype(saved.dtype)).view(saved.shard.shape)


def statistics_of(shards: Iterable[Tensor]) -> TensorStatistics:
    """Return the statistics over all elements of `shards`, sums in float64."""
    low, high, total = float("inf"), float("-inf"), 0.0
    num_elements = num_finite = num_nan = num_zero = 0
    for shard in shards:
        values = shard.reshape(-1).to(torch.float64)
        finite = values[values.isfinite()]
        num_elements, num_finite = num_elements + values.numel(), num_finite + finite.numel()
        num_nan += int(values.isnan().sum())
        num_zero += int((values == 0).sum())
        if finite.numel():
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
            total += float(finite.sum())
    return TensorStatistics(
        minimum=low if num_finite else None,
        maximum=high if num_finite else None,
        mean=total / num_finite if num_finite else None,
        num_nan=num_nan,
        num_infinite=num_elements - num_finite - num_nan,
        num_zero=num_zero,
        num_elements=num_elements,
    )
