"""compare: two steps or two runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import BadZipFile

from meshwright.app.results.comparison_result import ComparisonResult, RunComparisonResult
from meshwright.app.results.result import viewed
from meshwright.app.results.simulation_result import Simulation
from meshwright.errors import ConfigError
from meshwright.evaluation.dataset.own_run import read_manifest
from meshwright.spec.run.run import Run
from meshwright.spec.run.run_comparison import compare_runs
from meshwright.spec.run.run_report import read_metrics
from meshwright.spec.step.comparison import compare as compare_steps
from meshwright.spec.trace.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Sequence

Step = Path | str | Timeline | Simulation
"""What a step can be read from."""


def compare(a: Step, b: Step, *, step: int | None = None) -> ComparisonResult | RunComparisonResult:
    """Return how A and B differ: their steps by component, or, of two runs without profiles, losses and throughput.

    Each is a run folder, a folder or a .npz file that `simulate --out` wrote, a trace of torch.profiler (.json or
    .json.gz) of one rank, a simulation or its timeline. `step` is one of a profile; default: its last. Raises
    ConfigError for what is none of these.
    """
    folders = [Path(one) for one in (a, b) if not isinstance(one, Timeline | Simulation)]
    if step is None and len(folders) == 2 and all(map(_is_plain_run, folders)):
        return _compare_runs(folders)
    return viewed(ComparisonResult, compare_steps(read_step(a, step), read_step(b, step)))


def read_step(place: Step, step: int | None = None) -> Timeline:
    """Return the step at `place`; raises ConfigError for what holds none."""
    if isinstance(place, Simulation):
        if place.timeline is None:
            raise ConfigError(f"{place!r} has no timeline to compare: its step does not end")
        return place.timeline
    if isinstance(place, Timeline):
        return place
    path = Path(place)
    written = path / "timeline.npz" if path.is_dir() else path
    if written.suffix == ".npz" and written.is_file():
        try:
            return Timeline.load(written)
        except (BadZipFile, KeyError, ValueError) as error:
            raise ConfigError(f"{written} is no timeline ({error}): name one that simulate --out wrote") from None
    # These read profiles, which takes torch.
    from meshwright.profiler.profiled_timeline import profile_of_run, timeline_of

    if path.is_dir():
        return profile_of_run(path, step)
    return timeline_of([path], path.name, step)


def _is_plain_run(path: Path) -> bool:
    """Return whether `path` is the folder of a run of which no step was profiled."""
    run = Run(path)
    return run.manifest.is_file() and not any(run.timelines.glob("*.json.gz"))


def _compare_runs(folders: Sequence[Path]) -> RunComparisonResult:
    a, b = (Run(folder) for folder in folders)
    metrics = read_metrics(a), read_metrics(b)
    for folder, one in zip(folders, metrics, strict=True):
        if not len(one):
            raise ConfigError(f"{folder} has no finished step: name a run that has trained")
    found = compare_runs((str(folders[0]), str(folders[1])), (read_manifest(a), read_manifest(b)), metrics)
    return viewed(RunComparisonResult, found)
