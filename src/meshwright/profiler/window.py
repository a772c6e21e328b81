"""Profiler window: consecutive steps under torch.profiler, written as one Chrome trace per rank."""

from pathlib import Path
from types import TracebackType
from typing import Self

from torch.profiler import ProfilerActivity, profile, supported_activities

from meshwright.log import logger
from meshwright.units import counted


class ProfilerWindow:
    """Context manager that profiles steps [start, start + num_steps), none if start is None.

    With `with_memory` the traces hold allocations too, for viewers of them, which takes memory and time.
    """

    def __init__(self, folder: Path, rank: int, start: int | None, num_steps: int, *, with_memory: bool = True) -> None:
        self._folder, self._rank, self._with_memory = folder, rank, with_memory
        self._start, self._num_steps = start, num_steps
        self._profile: profile | None = None
        self._num_profiled = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._profile is not None:
            self._write()
        if self._start is not None and not self._num_profiled and error is None:
            logger.warning("no step was profiled: run.profile_start = %s is not a step of this attempt", self._start)

    def before_step(self, step: int) -> None:
        """Start profiling if the window starts at `step`."""
        if step == self._start:
            activities = supported_activities() & {ProfilerActivity.CPU, ProfilerActivity.CUDA}
            # acc_events only avoids torch 2.11's warning about cleared events: there is one cycle.
            window = profile(
                activities=activities, record_shapes=True, profile_memory=self._with_memory, acc_events=True
            )
            window.__enter__()
            self._profile = window

    def after_step(self, step: int) -> None:
        """Write the trace if the window ends at `step`."""
        self._num_profiled += self._profile is not None
        if self._start is not None and self._profile is not None and step >= self._start + self._num_steps - 1:
            self._write()

    def _write(self) -> None:
        assert self._profile is not None
        self._profile.__exit__(None, None, None)
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"step-{self._start}-rank-{self._rank}.json.gz"
        self._profile.export_chrome_trace(str(path))
        self._profile = None
        logger.info("profile of %s from step %s: %s", counted(self._num_profiled, "step"), self._start, path)
