"""choose_checkpoints(): activation checkpointing of each block, so that every rank fits with the least recomputation.

    levels     0: all of a rank's blocks save everything; each further level moves one more block to the next policy
    policies   none, selective, full; selective is skipped where it costs more per byte than full
    choice     the lowest level whose step fits, found by bisection

Each pipeline rank chooses independently: the first hold the most microbatches, and the choice of one does not change
the memory of others. The peak of a level is measured on a traced step, without a formula. Ignored: differences between
blocks of one rank, and peaks that grow with the level.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshwright.errors import InfeasibleLayout
from meshwright.spec.layout.layout import ActivationCheckpoint
from meshwright.units import format_bytes_apart

Checkpoints = tuple[ActivationCheckpoint, ...]
"""The policy of each block of the model."""


@dataclass(frozen=True)
class Need:
    """Memory and recomputation of a pipeline rank's step."""

    peak_bytes: int
    recomputed: float
    """Amount recomputed, in any unit common to all."""


Measure = Callable[[Checkpoints], Sequence[Need]]
"""From the policy of each block to the need of each pipeline rank."""


def choose_checkpoints(blocks_of_rank: Sequence[Sequence[int]], budget_bytes: int, measure: Measure) -> Checkpoints:
    """Return the policy of each block; `blocks_of_rank` are the block numbers of each pipeline rank.

    Raises InfeasibleLayout where a rank does not fit even with full recomputation.
    """
    num_blocks = sum(len(blocks) for blocks in blocks_of_rank)
    none = measure(_alike("none", num_blocks))
    if all(need.peak_bytes <= budget_bytes for need in none):
        return _alike("none", num_blocks)
    selective, full = measure(_alike("selective", num_blocks)), measure(_alike("full", num_blocks))
    _require_fit(full, budget_bytes)
    ranks = [_Rank(blocks, budget_bytes, none[at], selective[at], full[at]) for at, blocks in enumerate(blocks_of_rank)]
    while not all(rank.is_settled for rank in ranks):
        needs = measure(_joined(ranks, num_blocks))
        for rank, need in zip(ranks, needs, strict=True):
            rank.learn(need.peak_bytes)
    return _joined(ranks, num_blocks)


class _Rank:
    """The search of a pipeline rank for its level."""

    def __init__(self, blocks: Sequence[int], budget_bytes: int, none: Need, selective: Need, full: Need) -> None:
        self.blocks, self._budget = blocks, budget_bytes
        saved = none.peak_bytes - selective.peak_bytes, none.peak_bytes - full.peak_bytes
        pays = saved[0] > 0 and selective.recomputed * saved[1] <= full.recomputed * saved[0]
        self._path: Checkpoints = ("none", "selective", "full") if pays else ("none", "full")
        needs = [none, selective, full] if pays else [none, full]
        fits = next(level for level, need in enumerate(needs) if need.peak_bytes <= budget_bytes)
        # Peaks are known for the levels at which all blocks have the same policy.
        self._fits, self._fits_bytes = fits * len(blocks), needs[fits].peak_bytes
        self._fails, self._fails_bytes = (fits - 1) * len(blocks), needs[max(fits - 1, 0)].peak_bytes

    @property
    def is_settled(self) -> bool:
        """Return whether the lowest level that fits is known."""
        return self._fits == 0 or self._fits - self._fails <= 1

    @property
    def level(self) -> int:
        """Return the level to try, or the one that was found."""
        if self.is_settled:
            return self._fits
        share = (self._fails_bytes - self._budget) / max(self._fails_bytes - self._fits_bytes, 1)
        guess = self._fails + math.ceil(share * (self._fits - self._fails))
        return min(max(guess, self._fails + 1), self._fits - 1)

    def learn(self, peak_bytes: int) -> None:
        """Record the peak of the level that was tried."""
        if self.is_settled:
            return
        if peak_bytes <= self._budget:
            self._fits, self._fits_bytes = self.level, peak_bytes
        else:
            self._fails, self._fails_bytes = self.level, peak_bytes

    def saves(self) -> dict[int, ActivationCheckpoint]:
        """Return the policy of each block at the level."""
        step, further = divmod(self.level, max(len(self.blocks), 1))
        return {block: self._path[step + (at < further)] for at, block in enumerate(self.blocks)}


def _alike(kind: ActivationCheckpoint, num_blocks: int) -> Checkpoints:
    return (kind,) * num_blocks


def _joined(ranks: Sequence[_Rank], num_blocks: int) -> Checkpoints:
    saves = {block: kind for rank in ranks for block, kind in rank.saves().items()}
    return tuple(saves[block] for block in range(num_blocks))


def _require_fit(full: Sequence[Need], budget_bytes: int) -> None:
    most = max(range(len(full)), key=lambda rank: full[rank].peak_bytes)
    if full[most].peak_bytes > budget_bytes:
        where = f" on pipeline rank {most}" if len(full) > 1 else ""
        needed, budget = format_bytes_apart(full[most].peak_bytes, budget_bytes)
        raise InfeasibleLayout(
            f"tensors take {needed} of memory{where} even with "
            f'layout.activation_checkpoint = "full", more than the budget of {budget}: raise '
            f"layout.memory_budget_bytes to {full[most].peak_bytes} if the device has so much, lower "
            "train.seq_len, or layout.microbatch_size where it is more than 1, or raise layout.dp_shard or layout.tp"
        )
