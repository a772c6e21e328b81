"""The conditions of `meshwright simulate`: jitter, slow ranks and routing, each checked before anything is traced."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.simulator.engine.conditions import Conditions
    from meshwright.spec.trace.fault import Fault

_MOST_JITTER = 1.0
"""At which one operation in 40 takes 4 times its cost; no machine is as noisy as that."""
_MOST_SLOWER = 1e6


def conditions_of(given: dict[str, Any]) -> Conditions:
    """Return how the step departs from the usual one; raises ConfigError for a value that means nothing."""
    from meshwright.errors import ConfigError
    from meshwright.simulator.engine.conditions import Conditions
    from meshwright.spec.machine.allocator_settings import has_expandable_segments, set_allocator
    from meshwright.tracer.extrapolate.routing import parse_routing

    parse_routing(given["routing"])
    jitter = given["jitter"]
    if not 0 <= jitter <= _MOST_JITTER:
        raise ConfigError(
            f"--jitter {jitter} is the spread of the logarithm of every operation's time, 0 to {_MOST_JITTER:g}: "
            "write 0.05 for 5 %"
        )
    environment = dict(os.environ)
    if not given["build"]:
        set_allocator(environment)
    return Conditions(
        seed=given["seed"],
        jitter=jitter,
        faults=tuple(_slow_rank(text) for text in given["slow_rank"]),
        has_expandable_segments=has_expandable_segments(environment),
    )


def require_ranks(conditions: Conditions, num_ranks: int) -> None:
    """Raise ConfigError for a slow rank that a step on `num_ranks` ranks does not have."""
    from meshwright.errors import ConfigError
    from meshwright.units import counted

    for fault in conditions.faults:
        if fault.rank >= num_ranks:
            raise ConfigError(
                f"--slow-rank {fault.rank}:{fault.argument:g}: the rank must be less than the "
                f"{counted(num_ranks, 'rank')} of the step: write 0 to {num_ranks - 1}, or a larger --cluster"
            )


def _slow_rank(text: str) -> Fault:
    from meshwright.errors import ConfigError
    from meshwright.spec.trace.fault import Fault

    rank, _, factor = text.partition(":")
    try:
        number, slower = int(rank), float(factor)
    except ValueError:
        raise ConfigError(f"--slow-rank {text} is no rank and how many times slower it is: write 3:1.5") from None
    if number < 0 or not 0 < slower <= _MOST_SLOWER:
        raise ConfigError(
            f"--slow-rank {text}: the rank must be 0 or more and the factor more than 0 and at most {_MOST_SLOWER:g}; "
            "write 3:1.5 for a rank 3 that takes half as long again"
        )
    return Fault(kind="slow-rank", rank=number, argument=slower)
