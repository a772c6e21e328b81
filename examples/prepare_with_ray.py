"""Tokenise the data of a job on all nodes of a Ray cluster: python examples/prepare_with_ray.py job.toml 16.

data.cache_dir and data.source must be the same folders on every node.
"""

import sys

import ray

import meshwright as mw


@ray.remote
def prepare_shard(job: str, shard: str) -> int:
    """Make one shard and return the number of its parts that were missing."""
    return sum(one.num_parts_made for one in mw.datasets.prepare(job, shard=shard).sources)


def main(job: str, num_shards: int) -> None:
    # The first call measures the text, which would only keep the others waiting.
    made = ray.get(prepare_shard.remote(job, f"0/{num_shards}"))
    made += sum(ray.get([prepare_shard.remote(job, f"{shard}/{num_shards}") for shard in range(1, num_shards)]))
    print(f"{made} parts made in {num_shards} shards")
    mw.datasets.prepare(job).show()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
