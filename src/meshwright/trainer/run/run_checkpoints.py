"""Checkpoints of a run while it trains: synchronous or in the background, failures reported, old ones removed."""

from __future__ import annotations

import math
import os
import time
from types import TracebackType
from typing import Any, Final, Self

from meshwright.checkpoint.background.saver import BackgroundSaver, Finished, WriterOptions
from meshwright.checkpoint.background.staging import num_bytes_of
from meshwright.checkpoint.checkpoint import save
from meshwright.checkpoint.prune import prune
from meshwright.checkpoint.remote.uploader import UploadEnd, Uploader
from meshwright.checkpoint.shards import flatten, local_shards
from meshwright.errors import CheckpointError
from meshwright.log import logger
from meshwright.spec.run.run import Run
from meshwright.trainer.step.training import Training
from meshwright.units import format_bytes, format_duration

AUTO_ASYNC_BYTES: Final = 64 << 20
"""State of a rank from which checkpoint.mode = "auto" saves in the background; less is written in about 0.1 s."""


class RunCheckpoints:
    """Saves of one rank; use it in a `with`, so that saves in flight are not lost."""

    def __init__(self, training: Training, run: Run) -> None:
        self._training, self._run = training, run
        self._section = training.job.checkpoint
        self._saver: BackgroundSaver | None = None
        self._mode = self._section.mode
        self._uploader: Uploader | None = None
        if self._section.remote is not None and training.ranks.is_first:
            self._uploader = Uploader(run, self._section.remote, self._section.retention, self._section.niceness)
        self._failed: dict[str, str] = {}
        """Message by name of the folder, of saves in the background."""
        self._num_recorded = 0
        self._last_error: str | None = None

    def __enter__(self) -> Self:
        self._training.step.before_update = self._wait_until_staged
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # After an error a peer may be gone, whose writer process would be waited for.
        if self._saver is not None and error is None:
            self._saver.close()
        if self._uploader is not None:
            self._uploader.close()

    def save(self, step: int, validation_loss: float | None = None) -> None:
        """Commit the state after `step`, or start to, with the loss measured at this step, if any; a collective."""
        started_s = time.perf_counter()
        folder, state, metadata = self._run.checkpoint(step), self._training.state(), self._training.metadata(step)
        if validation_loss is not None and math.isfinite(validation_loss):
            metadata["validation_loss"] = validation_loss
        if self._resolved_mode(state) == "async":
            assert self._saver is not None
            self._saver.save(folder, state, metadata, self._training.changing_names())
            return
        save(folder, state, metadata)
        self._committed(Finished(folder, None, time.perf_counter() - started_s))

    def report(self) -> dict[str, Any]:
        """Log which saves and uploads ended since the last call; return news for the manifest's results."""
        for finished in self._saver.finished() if self._saver is not None else []:
            self._take(finished)
        return self._news([] if self._uploader is None else self._uploader.poll())

    def finish(self) -> dict[str, Any]:
        """Wait for the saves and uploads in flight, return as `report`; raises CheckpointError if the newest failed."""
        for finished in self._saver.drain() if self._saver is not None else []:
            self._take(finished)
        news = self._news([] if self._uploader is None else self._uploader.drain())
        if self._last_error is not None:
            raise CheckpointError(self._last_error)
        return news

    def _news(self, uploads: list[UploadEnd]) -> dict[str, Any]:
        """Log the uploads that ended; return what the manifest's results do not say yet."""
        for one in uploads:
            if one.error is None and one.num_bytes == 0:
                logger.debug("step-%d was complete at %s", one.step, self._section.remote)
            elif one.error is None:
                took = f"{format_bytes(one.num_bytes)} in {format_duration(one.duration_s)}"
                logger.info("step-%d is complete at %s, %s", one.step, self._section.remote, took)
            else:
                logger.error("upload of step-%d failed and will be retried: %s", one.step, one.error)
        news: dict[str, Any] = {}
        if self._uploader is not None and uploads:
            news["remote"] = self._uploader.results()
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
        if self._training.ranks.is_first:
            in_use = []
            if self._uploader is not None:
                self._uploader.add(int(finished.folder.name.removeprefix("step-")))
                in_use = self._uploader.in_use
            prune(self._run, self._section.retention, in_use)

    def _wait_until_staged(self) -> None:
        if self._saver is not None:
            self._saver.wait_until_staged()

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
