"""Checkpoints of a run while it trains: synchronous or in the background, failures reported, old ones removed."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from meshwright.checkpoint.background.saver import BackgroundSaver, Finished, WriterOptions
from meshwright.checkpoint.background.staging import num_bytes_of
from meshwright.checkpoint.checkpoint import save
from meshwright.checkpoint.prune import prune
from meshwright.checkpoint.shards import flatten, local_shards
from meshwright.cost.chosen_interval import ChosenInterval
from meshwright.errors import CheckpointError
from meshwright.log import logger
from meshwright.spec.run.run import Run
from meshwright.spec.run.run_events import append_event
from meshwright.trainer.run.checkpoint_copies import CheckpointCopies
from meshwright.trainer.run.memory.memory_copies import MemoryCopies
from meshwright.trainer.run.run_folder import read_manifest
from meshwright.trainer.run.save_schedule import SaveCost, SaveSchedule
from meshwright.trainer.step.training import Training
from meshwright.units import format_duration

AUTO_ASYNC_BYTES: Final = 64 << 20
"""State of a rank from which checkpoint.mode = "auto" saves in the background; less is written in about 0.1 s."""


_LEAST_STALL_S: Final = 1e-3
"""Shorter waits are no events."""


class RunCheckpoints:
    """Saves of one rank; use it in a `with`, so that saves in flight are not lost."""

    def __init__(self, training: Training, run: Run, start_step: int, in_memory: MemoryCopies | None = None) -> None:
        """A collective with checkpoint.interval = "auto"."""
        self._training, self._run = training, run
        self._in_memory = in_memory
        self._section = training.job.checkpoint
        self._saver: BackgroundSaver | None = None
        self._mode = self._section.mode
        self._copies = CheckpointCopies(run, self._section) if training.ranks.is_first else None
        self._longest_s = 0.0
        """Of the saves of this attempt."""
        self._stalled_s = 0.0
        """What training has waited for saves in this attempt."""
        recorded = self._recorded_interval() if self._section.interval == "auto" else None
        self._schedule = SaveSchedule(
            training.job, training.ranks.num_ranks, start_step, training.ranks.gather, recorded
        )
        self._failed: dict[str, str] = {}
        """Message by name of the folder, of saves in the background."""
        self._num_recorded = 0
        self._last_error: str | None = None
        self._is_saved = False
        """Whether the state with which this attempt ends is on disk."""

    def __enter__(self) -> Self:
        step = self._training.step
        step.before_update = self._wait_until_staged
        if step.replica_guard is not None:
            step.replica_guard.before_write = self._wait_until_staged
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # After an error a peer may be gone, whose writer process would be waited for.
        if self._saver is not None and error is None:
            self._saver.close()
        if self._copies is not None:
            self._copies.close()
        if self._in_memory is not None and error is None:
            self._in_memory.close(is_saved=self._is_saved)

    def prepare(self, steps_left: int) -> None:
        """Make ready for saves in the background, where so many steps have some before their end; a collective.

        Called after a first step, which gives the state its size.
        """
        has_some = self._schedule.is_any_due(steps_left)
        if has_some and self._resolved_mode(state := self._training.state()) == "async":
            assert self._saver is not None
            self._saver.prepare(state)

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after `step`; none is while updates are skipped, which may be spoiled."""
        guard = self._training.step.guard
        return self._schedule.is_due(step) and not (guard is not None and guard.is_skipping)

    def save(self, step: int, validation_loss: float | None = None) -> None:
        """Commit the state after `step`, or start to, with the loss measured at this step, if any; a collective."""
        folder, state, metadata = (
            self._run.checkpoint(step),
            self._training.state(),
            self._metadata(step, validation_loss),
        )
        with self._stall(step):
            if self._resolved_mode(state) == "async":
                assert self._saver is not None
                self._saver.save(folder, state, metadata, self._training.changing_names())
            else:
                self._save_now(folder, state, metadata)
        self._schedule.saved(step)

    @contextmanager
    def _stall(self, step: int | None = None) -> Iterator[None]:
        """Count the time within the context as a wait for a checkpoint; rank 0 writes it to the run's events."""
        started_s = time.perf_counter()
        yield
        seconds = time.perf_counter() - started_s
        self._stalled_s += seconds
        if self._training.ranks.is_first and seconds > _LEAST_STALL_S:
            append_event(self._run, "checkpoint", duration_s=seconds, step=step)

    def copy_to_memory(self, step: int) -> None:
        """Make a copy in memory where one is due after `step`; a collective."""
        if self._in_memory is not None:
            self._in_memory.after_step(step)

    def forget_copies(self) -> None:
        """Remove the copies in memory, of steps that will be done again; a collective."""
        if self._in_memory is not None:
            self._in_memory.forget()

    def save_before_kill(self, step: int, validation_loss: float | None, deadline_s: float) -> dict[str, Any]:
        """Commit the state after `step`, in the foreground, if the time until `deadline_s` allows it; a collective.

        `deadline_s` is on the clock of time.monotonic. Saves in flight end first; uploads and exports get the time
        that is left. Return as `report`; raises CheckpointError if the newest save failed.
        """
        self.settle()
        ranks, job = self._training.ranks, self._training.job
        # The slowest rank's, since all save together.
        left_s = min(ranks.gather(deadline_s - time.monotonic()))
        deadline_s = time.monotonic() + left_s
        longest_s = max(ranks.gather(self._longest_s))
        guard = self._training.step.replica_guard
        if guard is not None and not guard.is_sound(step, is_stopping=True):
            logger.error("no checkpoint after step %d, whose replicas differ: --resume takes an earlier one", step)
        elif left_s > longest_s or step >= job.train.steps:
            with self._stall(step):
                state = self._training.state()
                self._save_now(self._run.checkpoint(step), state, self._metadata(step, validation_loss))
            self._is_saved = True
        else:
            newest = max(self._run.checkpoint_steps(), default=0)
            left, longest = format_duration(max(0.0, left_s)), format_duration(longest_s)
            logger.error(
                "no checkpoint after step %d: run.grace_s = %g leaves %s, and a save took %s; the newest is step-%d",
                *(step, job.run.grace_s, left, longest, newest),
            )
        return self._ended(deadline_s - time.monotonic())

    def settle(self) -> None:
        """Wait for the saves in flight."""
        if self._saver is not None:
            with self._stall():
                for finished in self._saver.drain():
                    self._take(finished)

    def report(self, step: int) -> dict[str, Any]:
        """Log which saves and copies ended since the last call; return news for the manifest's results.

        Called after each step; a collective with checkpoint.interval = "auto".
        """
        for finished in self._saver.finished() if self._saver is not None else []:
            self._take(finished)
        news = {} if self._copies is None else self._copies.report()
        chosen = self._schedule.review(step, SaveCost(self._stalled_s, self._longest_s or None))
        if chosen is not None:
            logger.info("%s", chosen)
            news["checkpoint_interval"] = chosen.to_dict()
        return self._news(news)

    def _recorded_interval(self) -> ChosenInterval | None:
        """Return what an earlier attempt has chosen, None where none has; a collective."""
        manifest = read_manifest(self._run) if self._training.ranks.is_first else None
        found = None if manifest is None else manifest.results.get("checkpoint_interval")
        # Rank 0's: on another host a shared folder may show an older manifest.
        found = self._training.ranks.gather(found)[0]
        return None if found is None else ChosenInterval.from_dict(found)

    def finish(self, step: int) -> dict[str, Any]:
        """Wait for the saves and copies in flight, return as `report`; raises CheckpointError if the newest failed.

        The state after `step`, the last one, is saved where it was read from memory and no step was left to do.
        """
        self.settle()
        if self._in_memory is not None and self._in_memory.restored_step == step:
            self._save_now(self._run.checkpoint(step), self._training.state(), self._metadata(step, None))
        news = self._ended(math.inf)
        self._is_saved = True
        return news

    def _ended(self, timeout_s: float) -> dict[str, Any]:
        news: dict[str, Any] = {}
        if self._copies is not None:
            news = self._copies.finish(timeout_s)
            # What was being copied when newer ones were committed.
            prune(self._run, self._section.retention, self._copies.in_use)
        news = self._news(news)
        if self._last_error is not None:
            raise CheckpointError(self._last_error)
        return news

    def _metadata(self, step: int, validation_loss: float | None) -> dict[str, Any]:
        metadata = self._training.metadata(step)
        if validation_loss is not None and math.isfinite(validation_loss):
            metadata["validation_loss"] = validation_loss
        return metadata

    def _save_now(self, folder: Path, state: dict[str, Any], metadata: dict[str, Any]) -> None:
        started_s = time.perf_counter()
        save(folder, state, metadata)
        self._last_error = None
        self._committed(Finished(folder, None, time.perf_counter() - started_s))

    def _news(self, news: dict[str, Any]) -> dict[str, Any]:
        if len(self._failed) > self._num_recorded:
            news["failed_checkpoints"] = dict(self._failed)
            self._num_recorded = len(self._failed)
        return news

    def _take(self, finished: Finished) -> None:
        self._last_error = finished.error
        if finished.error is None:
            self._committed(finished)
            return
        self._failed[finished.folder.name] = finished.error
        logger.error("checkpoint %s failed, training continues: %s", finished.folder, finished.error)

    def _committed(self, finished: Finished) -> None:
        logger.info("checkpoint %s in %s", finished.folder, format_duration(finished.duration_s))
        self._longest_s = max(self._longest_s, finished.duration_s)
        if self._copies is not None:
            self._copies.add(int(finished.folder.name.removeprefix("step-")))
            prune(self._run, self._section.retention, self._copies.in_use)

    def _wait_until_staged(self) -> None:
        if self._saver is not None and self._saver.num_in_flight:
            with self._stall():
                self._saver.wait_until_staged()
        if self._in_memory is not None:
            self._in_memory.wait_until_staged()

    def _resolved_mode(self, state: dict[str, Any]) -> str:
        """Return "sync" or "async", decided at the first save, equal on all ranks; a collective then."""
        if self._mode == "auto":
            num_bytes = max(self._training.ranks.gather(num_bytes_of(local_shards(flatten(state)))))
            self._mode = "async" if num_bytes >= AUTO_ASYNC_BYTES else "sync"
        if self._mode == "async" and self._saver is None:
            options = WriterOptions(self._section.niceness, self._section.max_bytes_per_s)
            saver = BackgroundSaver(os.environ.get("MASTER_ADDR", "localhost"), options)
            if (reason := saver.why_synchronous(state)) is not None:
                logger.warning("checkpoints are saved synchronously: %s", reason)
                saver.close()
                self._mode = "sync"
            else:
                self._saver = saver
        return self._mode
