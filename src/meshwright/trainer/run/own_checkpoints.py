"""OwnCheckpoints: a replica's own state at each of the run's checkpoints, where replicas differ between their sums.

The run's checkpoint is the state of the replica that writes it. Every other one keeps its own next to its logs, so that
all resume as they were; one without an intact own state resumes with the run's, as a replica that joins does.
"""

from typing import Self

from meshwright.checkpoint.checkpoint import save
from meshwright.checkpoint.format.durable import remove
from meshwright.checkpoint.prune import prune
from meshwright.fault_tolerance.replicas.replica_group import ReplicaGroup
from meshwright.spec.run.run import Run
from meshwright.trainer.step.training import Training


class OwnCheckpoints:
    """The checkpoints in a replica's folder."""

    @classmethod
    def of(cls, training: Training, run: Run, replicas: ReplicaGroup | None) -> Self | None:
        """Return those of this rank's replica; None where all replicas have the same state."""
        if replicas is None or not training.job.replicas.trains_locally:
            return None
        return cls(training, run.of_replica(replicas.replica))

    def __init__(self, training: Training, own: Run) -> None:
        """Keep them in the folder `own`."""
        self._training, self._own = training, own

    def save(self, step: int) -> None:
        """Commit the state after `step`, in the foreground; a collective of the replica."""
        self._remove(step)
        save(self._own.checkpoint(step), self._training.state(), self._training.metadata(step))
        if self._training.ranks.is_first:
            prune(self._own, self._training.job.checkpoint.retention)

    def forget(self, step: int) -> None:
        """Remove the state after `step` and later ones, where the run's checkpoint is this replica's own.

        A collective of the replica.
        """
        self._remove(step)

    def restore(self, step: int) -> None:
        """Load the state after `step`, if there is one, and remove later ones; a collective of the replica."""
        self._remove(step + 1)
        self._training.load_own(self._own, step)

    def _remove(self, first: int) -> None:
        """Remove the states from step `first` on, which were of a past that was given up."""
        if self._training.ranks.is_first:
            for step in self._own.checkpoint_steps():
                if step >= first:
                    remove(self._own.checkpoint(step))
        # No rank looks for one while another removes it.
        self._training.ranks.gather(None)
