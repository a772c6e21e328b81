"""Recording: the record of a run by the one that writes it: rank 0, of independent replicas that of the writer."""

from __future__ import annotations

import time
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from meshwright.fault_tolerance.hangs.hang_watch import HangWatch
from meshwright.fault_tolerance.replicas.replica_group import ReplicaGroup
from meshwright.log import logger
from meshwright.spec.run.run import Run
from meshwright.spec.step.estimate import Estimate
from meshwright.trainer.run.open_run import open_recorder
from meshwright.trainer.run.own_checkpoints import OwnCheckpoints
from meshwright.trainer.run.run_checkpoints import RunCheckpoints
from meshwright.trainer.run.run_recorder import RunRecorder
from meshwright.trainer.step.choice_evaluation import ChoiceEvaluation
from meshwright.trainer.step.training import Training


class Recording:
    """Of one rank; use it in a `with`."""

    def __init__(self, training: Training, run: Run, replicas: ReplicaGroup | None, estimate: Estimate | None) -> None:
        self._training, self._run, self._replicas, self._estimate = training, run, replicas, estimate
        self._own = OwnCheckpoints.of(training, run, replicas)
        self._choices = ChoiceEvaluation.of(training.step)
        self._stack = ExitStack()
        self._is_open = False
        self.recorder: RunRecorder | None = None
        """What writes, on one rank of all."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, trace)

    @property
    def is_ours(self) -> bool:
        """Return whether this process group writes the run's files: its only one, or the replica that does."""
        return self._replicas is None or self._replicas.is_writer

    @property
    def saves(self) -> bool:
        """Return whether these ranks save a state: that of the run, or their replica's own."""
        return self.is_ours or self._own is not None

    def save(self, checkpoints: RunCheckpoints, step: int, validation_loss: float | None) -> None:
        """Save the state after `step`, as the run's or this replica's own; a collective."""
        self._save_own(step)
        if self.is_ours:
            checkpoints.save(step, validation_loss)

    def save_before_kill(
        self, checkpoints: RunCheckpoints, step: int, validation_loss: float | None, deadline_s: float
    ) -> None:
        """Save the state after `step` as above, if the time until `deadline_s` allows it; a collective."""
        self._save_own(step)
        if self.is_ours:
            self.add_results(checkpoints.save_before_kill(step, validation_loss, deadline_s))

    def _save_own(self, step: int) -> None:
        if self._own is not None and self.is_ours:
            self._own.forget(step)
        elif self._own is not None:
            self._own.save(step)

    def follow(self, step: int) -> None:
        """Open the record from `step` on where these ranks come to write it, close it where others do; a collective.

        An attempt of the manifest begins with each that comes to write.
        """
        if self.is_ours and not self._is_open:
            self.recorder = open_recorder(self._training, self._run, step, self._estimate)
            if self.recorder is not None:
                self._stack.enter_context(self.recorder)
                if self._choices is not None:
                    logger.info("%s", self._choices)
        elif self._is_open and not self.is_ours:
            self._stack.close()
            self.recorder = None
        self._is_open = self.is_ours

    def answer_if_due(self, step: int, watch: HangWatch) -> None:
        """Measure and record the accuracy on the job's questions where that is due after `step`; a collective."""
        if self._choices is None or not self._choices.is_due(step):
            return
        watch.mark("validation")
        started_s = time.perf_counter()
        accuracies = self._choices()
        if self.recorder is not None:
            self.recorder.evaluation(step, accuracies)
            self.recorder.event("validation", step, time.perf_counter() - started_s)

    def add_results(self, news: dict[str, Any]) -> None:
        """Add to the manifest's results, on the rank that writes them."""
        if news and self.recorder is not None:
            self.recorder.add_results(**news)
