"""ReplicaTraining: a rank's training as its replica group sees it, and what the loop asks of that group."""

from __future__ import annotations

import signal
from itertools import chain
from typing import Any

from torch import Tensor

from meshwright.checkpoint.shards import flatten
from meshwright.fault_tolerance.hangs.hang_watch import HangWatch
from meshwright.fault_tolerance.replicas.replica_group import ReplicaGroup
from meshwright.fault_tolerance.stop_request import StopRequest
from meshwright.parallelism.torch_private.torch_compat import local_box
from meshwright.spec.job.job import Job
from meshwright.spec.job.sections import RunSection
from meshwright.spec.run.quorum import ReplicaPlace
from meshwright.spec.run.run import Run
from meshwright.trainer.launch.rank import RankConfig
from meshwright.trainer.run.memory.memory_copies import MemoryCopies
from meshwright.trainer.run.own_checkpoints import OwnCheckpoints
from meshwright.trainer.step.training import Training


class ReplicaTraining:
    """The state of one rank of an independent replica."""

    def __init__(self, training: Training, run: Run, own: OwnCheckpoints | None) -> None:
        """Restore from the checkpoints of `run`, and what differs in each replica from its `own`."""
        self._training, self._run, self._own = training, run, own

    @property
    def trains_locally(self) -> bool:
        """Return whether replicas take several steps between sums."""
        return self._training.job.replicas.trains_locally

    def restore(self) -> int:
        """Load the newest checkpoint, if there is one, and return its step, 0 without; a collective of the replica."""
        # Not only with --resume: all replicas of a run that begins may be lost, and what they saved is its own.
        step = self._training.load_newest(self._run)
        if self._own is not None:
            self._own.restore(step)
        return step

    def forget(self) -> bool:
        """Have the weights drawn again where no checkpoint is loaded; return whether they can be."""
        return self._training.forget_weights()

    def parts(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return this rank's tensors of the model, and all others of the state, in one order in all replicas."""
        flat = flatten(self._training.state())
        boxes = {name: [local_box(copy)[0] for copy in flat[name]] for name in sorted(flat)}
        of_model = {name: tensors for name, tensors in boxes.items() if name.startswith("model/")}
        others = {name: tensors for name, tensors in boxes.items() if name not in of_model}
        return [*chain(*of_model.values())], [*chain(*others.values())]

    def metadata(self, step: int) -> dict[str, Any]:
        """Return the rest of the state, as JSON holds it."""
        return self._training.metadata(step)

    def take_over(self, metadata: dict[str, Any]) -> None:
        """Take over the rest, after the tensors of the model were received; a collective of the replica."""
        self._training.take_over(metadata)

    def share(self, index: int, num_members: int) -> None:
        """Take the samples of a member's place from now on."""
        self._training.share(index, num_members)

    def warm_up(self) -> None:
        """Do once what the first step would be slow to do, without effect on the state that is received."""
        self._training.warm_up()


def watched_section(config: RankConfig) -> RunSection:
    """Return the limits by which a rank watches itself: of an independent replica, the coordinator ends what hangs."""
    section = config.job.run
    return section if config.replica is None else section.replace(hang_limit_s=0)


def join_others(place: ReplicaPlace, job: Job, watch: HangWatch) -> ReplicaGroup:
    """Return this rank's connection to other replicas, who hear of phases that take long."""
    replicas = ReplicaGroup(place, job.run.timeout_s, job.train.last_step)
    watch.after_marks.append(replicas.note_phase)
    return replicas


def begin(training: Training, config: RankConfig, replicas: ReplicaGroup | None) -> tuple[int, MemoryCopies | None]:
    """Return the step of the state that training starts from, a checkpoint's, a copy's or other replicas', and what
    makes copies in memory from now on, if any; a collective.
    """
    if replicas is not None:
        training.join_replicas(replicas)
        state = ReplicaTraining(training, config.run, OwnCheckpoints.of(training, config.run, replicas))
        return replicas.join(state, warms_up=config.warms_up), None
    in_memory = None
    if training.job.checkpoint.memory_interval:
        in_memory = MemoryCopies(training, config.run, resume=config.resume)
    if not config.resume:
        return 0, in_memory
    return training.load_newest(config.run) if in_memory is None else in_memory.restore(config.run), in_memory


def agree(
    training: Training, replicas: ReplicaGroup | None, step: int, stop: StopRequest
) -> tuple[int, signal.Signals | None]:
    """Return the steps that the state has once all are ready for the next, and what all stop for; a collective."""
    if replicas is None:
        return step, training.ranks.agree_on(stop.signal)
    outer = training.step.outer_sync
    if outer is not None and outer.pending is None and not outer.is_due(step):
        # Nothing is asked of other replicas between their sums.
        if stop.signal is not None:
            outer.announce_stop(stop.signal.name, step)
        return step, None
    return replicas.agree(step, stop.signal)
