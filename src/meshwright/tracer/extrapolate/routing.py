"""Routing of tokens to experts, for traces in which no tensor holds numbers.

Share of all tokens that the experts of each rank receive: equal (balanced), proportional to 1 / (i + 1)^exponent for
the i-th rank (zipf; Zipf's law), or all on the first one (worst). A token goes to each expert at most once, so a rank
receives no more copies of it than it has experts; the excess goes to the next ranks. Shares are the same in every layer
and microbatch, so the first rank has the most work and memory. Every rank sends the same number of tokens.
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
"""Replaces parallelism.host_sync, whose tensor has an element for each rank, twice: sent and received rows."""


def parse_routing(text: str) -> Routing:
    """Return the routing of `text`.

    Raises ConfigError for any other.
    """
    if text.endswith(".json"):
        return _given(Path(text))
    return _by_law(exponent_of(text))


def exponent_of(text: str) -> float:
    """Return the exponent of the routing `text`; raises ConfigError for an unknown one."""
    name, _, parameter = text.partition(":")
    try:
        exponent = {"balanced": 0.0, "worst": np.inf}[name] if not parameter else float(parameter)
    except (KeyError, ValueError):
        exponent = -1.0
    if not exponent >= 0 or (parameter and name != "zipf"):
        raise ConfigError(
            f"routing = {text!r}: must be balanced, worst, zipf:1.2 (any exponent of 0 or more), or a .json file "
            "with the rows that a real run sent and received"
        )
    return exponent


def rows_arriving(text: str, rows_sent: int, num_ranks: int, most: int) -> tuple[int, ...] | None:
    """Return the rows that each rank of a group receives if all send `rows_sent`; None for a .json file."""
    if text.endswith(".json"):
        return None
    return tuple(num_ranks * sent for sent in shared_out(rows_sent, num_ranks, exponent_of(text), most))


def read_as(routing: Routing, read: Callable[[Tensor], None]) -> Routing:
    """Return `routing` with a call of `read` for each tensor, since the host reads it."""

    def routed(tensor: Tensor, kind: str, total: int, rank: int, most: int) -> list[int]:
        read(tensor)
        return routing(tensor, kind, total, rank, most)

    return routed


@lru_cache(maxsize=256)
def shared_out(total: int, num_ranks: int, exponent: float, most: int) -> tuple[int, ...]:
    """Return the share of each rank of `total`: integers up to `most` with that sum; exponent 0 is an even share."""
    assert total <= num_ranks * most, "there are experts enough for all copies of a token"
    shares: list[int] = []
    left = total
    for rank in range(num_ranks):
        # Weights of the remaining ranks relative to this one; rounding favours the first ranks.
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
    """Return the routing of a file: a list of the rows that each call read, in order."""
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
