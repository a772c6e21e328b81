"""OuterSync: when independent replicas that train for several steps by themselves sum what has changed, and how.

    steps between syncs  d = sync_every / fragments;  a sync ends every d-th step, of the fragments in turn
    sync_delay_steps = 0       the sum is taken, and waited for, in the step of the sync
    sync_delay_steps = t       a fragment's change is taken t steps earlier, and summed in the background until the sync

The last step of all syncs every fragment, so that all replicas end with the same parameters. A sync of which a sum
failed is done again with the replicas that are left, from what is kept: no step is.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

from meshwright.fault_tolerance.replicas.replica_group import ReplicaGroup
from meshwright.log import logger
from meshwright.spec.job.job import Job
from meshwright.trainer.optimizer.outer_optimizer import OuterOptimizer


@dataclass
class _Sum:
    """A fragment's sum that is under way, or to be done again."""

    fragment: int
    local: list[Tensor]
    """This replica's parameters when it began."""
    total: Tensor | None = None
    """Sum of the changes of all replicas."""


class OuterSync:
    """Callable, after each step of a replica: sums and updates what is due."""

    def __init__(self, job: Job, optimizer: OuterOptimizer, replicas: ReplicaGroup) -> None:
        self.optimizer = optimizer
        self._section, self._last_step, self._replicas = job.replicas, job.train.steps, replicas
        self._sums: list[_Sum] = []
        self._background: _Background | None = None
        self._has_announced_stop = False
        self.pending: dict[str, Any] | None = None
        """What a step resulted in whose sync is to be done again, as JSON holds it; None where none is."""

    def is_due(self, step: int) -> bool:
        """Return whether a sync ends with `step`."""
        return self._section.is_sync(step, self._last_step)

    def __call__(self, step: int) -> bool:
        """Begin or end the sums of `step`, whose update is done; return false where a sync is to be done again.

        A collective of the replica, of all replicas where a sync ends.
        """
        delay = self._section.sync_delay_steps
        if not self.is_due(step):
            ends = step + delay
            if delay and ends < self._last_step and self.is_due(ends):
                # What is trained meanwhile changes the parameters themselves.
                self._sums = [_Sum(one, [own.clone() for own in self.optimizer.local(one)]) for one in self._due(ends)]
                self._background = _Background(self)
            return True
        if self._background is not None:
            self._background.wait()
            self._background = None
        elif not self._sums:
            self._sums = [_Sum(one, self.optimizer.local(one)) for one in self._due(step)]
        self.sum_missing()
        return self._commit(step)

    def sum_missing(self) -> None:
        """Sum what has not been summed with the members as they are; a collective of this rank's place in all."""
        for one in self._sums:
            if one.total is None:
                one.total = self.optimizer.change(one.fragment, one.local)
                self._replicas.sum(one.total)

    def announce_stop(self, why: str, step: int) -> None:
        """Log once in which step a stop will be honoured that was asked for in `step`."""
        if not self._has_announced_stop:
            self._has_announced_stop = True
            due = next(later for later in count(step + 1) if self.is_due(later))
            logger.info("%s: stopping at the next sum over replicas, after step %d", why, due)

    def metadata(self) -> dict[str, Any]:
        """Return what another replica that receives this one's state needs to know besides tensors."""
        return {"pending": self.pending}

    def take_over(self, metadata: dict[str, Any]) -> None:
        """Continue as the replica whose state was received, also where its sync is to be done again."""
        self.pending = metadata.get("pending")
        self._sums, self._background = [], None

    def _due(self, step: int) -> Sequence[int]:
        if step == self._last_step:
            return range(self._section.fragments)
        return [(step // self._section.steps_between_syncs - 1) % self._section.fragments]

    def _commit(self, step: int) -> bool:
        if not self._replicas.commits():
            for one in self._sums:
                one.total = None
            return False
        # With overlap, parameters went on; in the last step all replicas take the same.
        kept = 0.0 if step == self._last_step else self._section.merge_factor
        num_members = self._replicas.num_members
        for one in self._sums:
            assert one.total is not None
            mean = None if num_members == 1 else one.total.to(torch.float32).div_(num_members)
            self.optimizer.update(one.fragment, one.local, mean, kept)
        self._sums = []
        return True


class _Background:
    """Sums of one sync in a thread of their own; the loop's thread uses no lane meanwhile."""

    def __init__(self, sync: OuterSync) -> None:
        self._sync = sync
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="outer-sync", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return once the sums have ended; raises what they did."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._sync.sum_missing()
        except BaseException as error:
            self._error = error
