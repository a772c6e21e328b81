"""stage_times: what each action of a pipeline takes on each stage, from what the whole step takes.

    forward          a third of ends (embedding, head), and of what blocks do once, backward two
    second pass      blocks that recompute do so in each part of a split backward, and what is compiled of them is
                     computed whole in each; ends are not recomputed, nor compiled
    first stage      nothing asks for the gradient of its inputs: its first part is nothing, its second the whole

In shares of a rank's computation. Ignored: that attention's backward is all in the first part.
"""

from __future__ import annotations

from typing import NamedTuple

from meshwright.cost.pipeline.replay import StageTimes


class BackwardShares(NamedTuple):
    """What of the backwards of a step is more than one pass, as shares of what a rank computes, mean over ranks."""

    recomputed: float
    repeated: float
    """Backwards of compiled blocks that run twice."""
    split: float
    """Share of the backwards of all stages but the first that run in two parts."""


class StageShare(NamedTuple):
    """One stage's share of what all compute for a microbatch, with what blocks do again."""

    blocks: float
    ends: float


def stage_times(stages: tuple[StageShare, ...], shares: BackwardShares, microbatch: float) -> StageTimes:
    """Return the seconds of each stage's actions, where all ranks compute `microbatch` seconds for one of them."""
    of_blocks = max(sum(stage.blocks for stage in stages), 1e-12)
    once = max(1 - (shares.recomputed + shares.repeated) / of_blocks, 0.0)
    thirds = [(stage.blocks * once + stage.ends) * microbatch / 3 for stage in stages]
    inner = [0.0, *(stage.blocks for stage in stages[1:])]
    recompute_s = _each(shares.recomputed * microbatch, stages, shares.split)
    splits = max(sum(inner) * shares.split, 1e-12)
    second_s = [shares.repeated * microbatch * blocks / splits for blocks in inner]
    whole = [2 * third + again for third, again in zip(thirds, recompute_s, strict=True)]
    if not shares.split:
        return StageTimes(thirds, whole, thirds)
    inputs, weights = [0.0], [whole[0]]
    for place in range(1, len(stages)):
        half, again = thirds[place], recompute_s[place]
        # What is computed whole in both parts is half of either without it, and as much again.
        inputs.append(half + second_s[place] / 2 + again)
        weights.append(half + second_s[place] / 2 + again)
    return StageTimes(thirds, whole, weights, input_s=inputs)


def _each(recomputed_s: float, stages: tuple[StageShare, ...], split: float) -> list[float]:
    """Return what recomputing takes each stage once, if all that do it take `recomputed_s`."""
    passes = [1.0, *(1.0 + split for _ in stages[1:])]
    total = max(sum(stage.blocks * times for stage, times in zip(stages, passes, strict=True)), 1e-12)
    return [recomputed_s * stage.blocks / total for stage in stages]
