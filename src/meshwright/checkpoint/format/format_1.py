"""Format 1 of checkpoints: all shards of all ranks in checkpoint.json, as an index with manifests of format 2."""

from typing import Any


def upgraded(body: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of a checkpoint.json of format 1 as those of an index with manifests."""
    ranks = sorted(int(name.removeprefix("rank-").removesuffix(".bin")) for name in body["file_bytes"])
    sizes = [body["file_bytes"].get(_data_name(rank), 0) for rank in range(ranks[-1] + 1)] if ranks else []
    tensors: list[dict[str, Any]] = [{} for _ in sizes]
    for name, tensor in body["tensors"].items():
        for rank, own in enumerate(tensors):
            shards = [
                {key: value for key, value in shard.items() if key != "file"}
                for shard in tensor["chunks"]
                if shard["file"] == _data_name(rank)
            ]
            if shards or (rank == 0 and not tensor["chunks"]):
                own[name] = {"dtype": tensor["dtype"], "shape": tensor["shape"], "shards": shards}
    return {
        "format_version": 1,
        "save_id": body["save_id"],
        "metadata": body["metadata"],
        "sections": sorted({name.partition("/")[0] for name in body["tensors"]}),
        "ranks": [{"num_bytes": size, "manifest_xxh3_128": ""} for size in sizes],
        "manifests": [
            {"save_id": body["save_id"], "rank": rank, "num_bytes": size, "tensors": own}
            for rank, (size, own) in enumerate(zip(sizes, tensors, strict=True))
        ],
    }


def _data_name(rank: int) -> str:
    return f"rank-{rank:05d}.bin"
