"""Uploads and Hugging Face exports of a run's checkpoints while it trains, each by a process of its own."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from meshwright.checkpoint.background.step_worker import StepEnd, StepWorker
from meshwright.log import logger
from meshwright.spec.job.sections import CheckpointSection
from meshwright.spec.run.run import Run
from meshwright.units import format_bytes, format_duration


class _Kind(NamedTuple):
    key: str
    """Key of the manifest's results."""
    what: str
    place: str
    """Where the copies are: a URL or a folder."""
    worker: StepWorker


class CheckpointCopies:
    """What follows each committed checkpoint, on one rank: a copy at checkpoint.remote, and an export."""

    def __init__(self, run: Run, section: CheckpointSection) -> None:
        self._kinds: list[_Kind] = []
        committed, package = run.checkpoint_steps(), "meshwright.checkpoint"
        options: dict[str, Any] = {"niceness": section.niceness}
        if section.remote is not None:
            # What was uploaded by an earlier attempt is found complete.
            remote = options | {"url": section.remote, "rule": section.retention.to_dict()}
            worker = StepWorker(run, f"{package}.remote.upload", remote, committed)
            self._kinds.append(_Kind("remote", "upload", section.remote, worker))
        if section.export != "none":
            pending = {*committed} - {*run.export_steps()}
            worker = StepWorker(run, f"{package}.hf.export", options | {"dtype": section.export}, pending)
            self._kinds.append(_Kind("exports", "export", str(run.exports), worker))

    @property
    def in_use(self) -> list[int]:
        """Return the steps that are being read, which must not be removed."""
        return [step for kind in self._kinds for step in kind.worker.in_use]

    def add(self, step: int) -> None:
        """Copy the committed checkpoint after `step` when its turn comes."""
        for kind in self._kinds:
            kind.worker.add(step)

    def report(self) -> dict[str, Any]:
        """Log what ended since the last call, and return what the manifest's results do not say yet."""
        return self._log([(kind, kind.worker.poll()) for kind in self._kinds])

    def finish(self, timeout_s: float = math.inf) -> dict[str, Any]:
        """Wait until all is done or has failed several times, at most `timeout_s`, and return as `report`."""
        ended = [(kind, kind.worker.drain(timeout_s)) for kind in self._kinds]
        return self._log(ended, is_end=True)

    def close(self) -> None:
        """End the processes; what they had not done is done when the run is resumed."""
        for kind in self._kinds:
            kind.worker.close()

    def _log(self, ended: list[tuple[_Kind, list[StepEnd]]], *, is_end: bool = False) -> dict[str, Any]:
        news: dict[str, Any] = {}
        for kind, ends in ended:
            for one in ends:
                _log_end(kind, one)
            if ends or is_end:
                place = "url" if kind.key == "remote" else "folder"
                news[kind.key] = {place: kind.place, **kind.worker.results()}
        return news


def _log_end(kind: _Kind, end: StepEnd) -> None:
    if end.error is not None:
        logger.error("%s of step-%d failed and will be retried: %s", kind.what, end.step, end.error)
    elif end.num_bytes == 0:
        logger.debug("step-%d was complete at %s", end.step, kind.place)
    else:
        took = f"{format_bytes(end.num_bytes)} in {format_duration(end.duration_s)}"
        logger.info("%s of step-%d is complete at %s, %s", kind.what, end.step, kind.place, took)
