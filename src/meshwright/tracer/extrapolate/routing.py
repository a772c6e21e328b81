"""Routing: how many tokens go where, while no tensor holds a number.

The share of all tokens that the experts of each rank get: all the same (balanced), that of the i-th rank as
1 / (i + 1)^exponent (zipf; Zipf's law), or all to the first one (worst). A token goes to each expert once, so that no
rank gets more copies of it than it has experts: the next ranks take what is too many. A group of ranks has the same
shares in every layer and every microbatch, so that the first rank has the most to do and to hold. Every rank has the
same number of tokens to send.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

Routing = Callable[[Any, str, int, int, int], list[int]]
"""Stands in for parallelism.host_sync, whose tensor has an element for each rank, twice: sent, and received."""


def parse_routing(text: str) -> Routing:
    """Return the routing that `text` names: balanced, zipf:EXPONENT, worst, or a file (.json) with those of a real run.

    Raises ConfigError for any other.
    """
    if text.endswith(".json"):
        return _given(Path(text))
    return _by_law(exponent_of(text))


def exponent_of(text: str) -> float:
    """Return the exponent of the law that `text` names; raises ConfigError for any other."""
    name, _, parameter = text.partition(":")
    try:
        exponent = {"balanced": 0.0, "worst": np.inf}[name] if not parameter else float(parameter)
    except (KeyError, ValueError):
        exponent = -1.0
    if exponent < 0 or (parameter and name != "zipf"):
        raise ConfigError(
            f"routing = {text!r} is no routing of tokens: balanced, worst, zipf:1.2 (or another exponent of 0 or "
            "more), or a .json file with the rows that a real run sent and received"
        )
    return exponent


def rows_arriving(text: str, rows_sent: int, num_ranks: int, most: int) -> tuple[int, ...] | None:
    """Return how many rows arrive at each rank of a group whose ranks send `rows_sent` each; None for a real run's."""
    if text.endswith(".json"):
        return None
    return tuple(num_ranks * sent for sent in shared_out(rows_sent, num_ranks, exponent_of(text), most))


def read_as(routing: Routing, read: Callable[[Tensor], None]) -> Routing:
    """Return `routing`, after `read` has noticed that the host reads the tensor."""

    def routed(tensor: Tensor, kind: str, total: int, rank: int, most: int) -> list[int]:
        read(tensor)
        return routing(tensor, kind, total, rank, most)

    return routed


@lru_cache(maxsize=256)
def shared_out(total: int, num_ranks: int, exponent: float, most: int) -> tuple[int, ...]:
    """Return how many of `total` each rank gets, none more than `most`, in whole numbers that sum to it; an exponent of
    0 is an even share.
    """
    assert total <= num_ranks * most, "there are experts enough for all copies of a token"
    shares: list[int] = []
    left = total
    for rank in range(num_ranks):
        # Of what is left, relative to this rank's own share; what is left of fractions goes to the first ranks.
        weights = ((rank + 1) / np.arange(rank + 1, num_ranks + 1)) ** exponent
        shares.append(min(most, math.ceil(round(left / float(weights.sum()), 6))))
        left -= shares[-1]
    return tuple(shares)


def _by_law(exponent: float) -> Routing:
    def routed(tensor: Tensor, kind: str, total: int, rank: int, most: int) -> list[int]:
        num_ranks = len(tensor) // 2
        sent = shared_out(total, num_ranks, exponent, most)
        return [*sent, *num_ranks * [sent[rank]]]

    return routed


def _given(file: Path) -> Routing:
    """What a program read, in order: a list of lists."""
    try:
        rows = iter(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"routing = {str(file)!r} must be a .json file with a list of the rows that each call read ({error}): "
            "name one, or use balanced, worst or zipf:1.2"
        ) from error

    def routed(tensor: Tensor, kind: str, total: int, rank: int, most: int) -> list[int]:
        found: list[int] = next(rows)
        return found

    return routed
