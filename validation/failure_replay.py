"""Replay of a run under given failures, step by step: what the closed formula of cost/expected_goodput.py averages."""

import math
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwright.cost.expected_goodput import FailureModel


@dataclass(frozen=True)
class Failure:
    """One failure."""

    gap_s: float
    """Time since the one before was detected, or since the first step."""
    hangs: bool
    """Whether it hangs, where it befalls work; in a restart it never does."""


def drawn(num_failures: int, mtbf_s: float, hang_share: float, seed: int) -> list[Failure]:
    """Return failures of a Poisson process, stratified: one gap of each of as many equally likely ranges, in any order.

    So that few of them have the mean, and nearly the distribution, of many.
    """
    draw = random.Random(seed)
    places = range(num_failures)
    gaps_s = [-mtbf_s * math.log1p(-(place + draw.random()) / num_failures) for place in places]
    hangs = [place < round(hang_share * num_failures) for place in places]
    draw.shuffle(gaps_s)
    draw.shuffle(hangs)
    return [Failure(gap_s, is_hang) for gap_s, is_hang in zip(gaps_s, hangs, strict=True)]


def endless(mtbf_s: float, hang_share: float, seed: int) -> Iterator[Failure]:
    """Yield failures of a Poisson process."""
    draw = random.Random(seed)
    while True:
        yield Failure(draw.expovariate(1 / mtbf_s), draw.random() < hang_share)


def replay(
    model: FailureModel, num_steps: int, steps_per_checkpoint: int, failures: Iterator[Failure]
) -> dict[str, float]:
    """Return the seconds of each cause that a run of so many steps takes; its mtbf_s is not looked at.

    After the last failure given there is none.
    """
    spent: dict[str, float] = defaultdict(float)
    step_s, saved, left_s = model.interval_s / steps_per_checkpoint, 0, 0.0

    def next_failure() -> tuple[float, bool]:
        failure = next(failures, Failure(math.inf, hangs=False))
        return failure.gap_s, failure.hangs

    left_s, hangs = next_failure()
    while saved < num_steps:
        num = min(steps_per_checkpoint, num_steps - saved)
        segment_s = num * step_s + model.checkpoint_s
        if left_s > segment_s:
            left_s -= segment_s
            spent["productive"] += num * step_s
            spent["checkpoint"] += model.checkpoint_s
            saved += num
            continue
        spent["repeated"] += left_s
        spent["hang" if hangs else "restart"] += model.hang_s if hangs else model.detection_s
        spent["failures"] += 1
        left_s, hangs = next_failure()
        while left_s <= model.restart_s:
            spent["restart"] += left_s + model.detection_s
            spent["failures"] += 1
            left_s, hangs = next_failure()
        left_s -= model.restart_s
        spent["restart"] += model.restart_s
    return dict(spent)


def share_of(spent: dict[str, float]) -> float:
    """Return the goodput of a replay."""
    return spent["productive"] / sum(seconds for cause, seconds in spent.items() if cause != "failures")


def spread(shares: Sequence[float]) -> float:
    """Return the standard deviation of shares."""
    mean = sum(shares) / len(shares)
    return math.sqrt(sum((share - mean) ** 2 for share in shares) / (len(shares) - 1))
