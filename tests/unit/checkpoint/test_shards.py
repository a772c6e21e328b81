"""Which rank saves which shard: decided by judges, on any number of ranks, each element once."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest

from meshwright.checkpoint.format.boxes import Box, coverage_problem
from meshwright.checkpoint.shards import Claim, judge_claims, judge_of

NUM_RANKS = 1024


def saved_boxes(claims: list[list[Claim]]) -> dict[str, list[Box]]:
    """Return the boxes that all ranks save, after every judge has decided on its tensors."""
    saved: dict[str, list[Box]] = defaultdict(list)
    for judge in {judge_of(claim.name, len(claims)) for of_rank in claims for claim in of_rank}:
        of_judge = [[claim for claim in of_rank if judge_of(claim.name, len(claims)) == judge] for of_rank in claims]
        verdicts, problems = judge_claims(of_judge)
        assert problems == []
        for own, rows in zip(of_judge, verdicts, strict=True):
            for claim, part in zip(own, rows, strict=True):
                if part is not None:
                    (first, *offsets), (_, *sizes) = claim.box
                    saved[claim.name].append(Box((first + part[0], *offsets), (part[1] - part[0], *sizes)))
    return saved


def claim(name: str, shape: tuple[int, ...], first: int, rows: int) -> Claim:
    num_elements = rows
    for size in shape[1:]:
        num_elements *= size
    return Claim(name, "float32", shape, Box((first,) + (0,) * (len(shape) - 1), (rows, *shape[1:])), 4 * num_elements)


@pytest.mark.parametrize("replicas", [1, 8, 1024])
def test_each_element_is_saved_once_by_1024_ranks(replicas: int) -> None:
    shards = NUM_RANKS // replicas
    shapes = {f"model/w{i}": (4096, 512 + i) for i in range(12)}
    claims = [
        [claim(name, shape, rank % shards * (shape[0] // shards), shape[0] // shards) for name, shape in shapes.items()]
        for rank in range(NUM_RANKS)
    ]
    saved = saved_boxes(claims)
    assert saved.keys() == shapes.keys()
    for name, boxes in saved.items():
        assert coverage_problem(boxes, shapes[name]) is None


def test_small_replicated_tensors_spread_over_the_ranks_and_large_ones_are_split() -> None:
    names = [f"model/norm.{i}" for i in range(512)]
    verdicts, problems = judge_claims([[claim(name, (64,), 0, 64) for name in names] for _ in range(8)])
    assert problems == []
    written = Counter(rank for rank, rows in enumerate(verdicts) for part in rows if part is not None)
    assert sum(written.values()) == len(names)
    assert max(written.values()) < 2 * len(names) / 8
    verdicts, _ = judge_claims([[claim("model/embedding", (32000, 4096), 0, 32000)] for _ in range(8)])
    assert sorted(part for rows in verdicts for part in rows if part) == [(i * 4000, (i + 1) * 4000) for i in range(8)]


def test_ranks_that_do_not_agree_are_named() -> None:
    other = claim("model/w", (8, 5), 0, 8)
    _, problems = judge_claims([[claim("model/w", (8, 4), 0, 8)], [other]])
    assert problems == ["ranks hold different tensors under the name model/w: float32 [8, 4] and float32 [8, 5]"]
    _, problems = judge_claims([[claim("model/w", (8, 4), 0, 4)], [claim("model/w", (8, 4), 2, 4)]])
    assert problems == ["the ranks do not hold model/w: elements at [2, 0] occur twice"]
    _, problems = judge_claims([[claim("model/w", (8, 4), 0, 4)], []])
    assert problems == ["the ranks do not hold model/w: 16 of 32 elements are missing"]
