"""compare: two steps or two runs side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

from pydantic import InstanceOf

from meshwright.app.arguments import Positive, checked
from meshwright.app.results.result import PlottedResult, viewed
from meshwright.app.results.simulation_result import Simulation
from meshwright.errors import ConfigError
from meshwright.evaluation.dataset.own_run import read_manifest, read_steps
from meshwright.pages.figures.run_figures import compared_curve_figure, has_curve, parts_figure
from meshwright.pages.html.comparison_html import write_comparison_html
from meshwright.pages.html.run_html import CURVES, shown_parts
from meshwright.pages.tables.run_table import compare_page, run_comparison_page
from meshwright.spec.run.run import Run
from meshwright.spec.run.run_comparison import RunComparison, compare_runs
from meshwright.spec.run.run_report import read_metrics
from meshwright.spec.step.comparison import Comparison
from meshwright.spec.step.comparison import compare as compare_steps
from meshwright.spec.trace.timeline import Timeline
from meshwright.units import counted, format_duration

Step = Path | str | InstanceOf[Timeline] | InstanceOf[Simulation]
"""What a step can be read from."""


@checked
def compare(a: Step, b: Step, *, step: Positive | None = None) -> ComparisonResult | RunComparisonResult:
    """Return how A and B differ: their steps by component, or, of two runs without profiles, losses and throughput.

    Each is a run folder, a folder or a .npz file that `simulate --out` wrote, a trace of torch.profiler (.json or
    .json.gz) of one rank, a simulation or its timeline. `step` is one of a profile; default: its last. Raises
    ConfigError for anything else.
    """
    folders = [Path(one) for one in (a, b) if not isinstance(one, Timeline | Simulation)]
    if missing := [str(folder) for folder in folders if not folder.exists()]:
        raise ConfigError(f"there is no {' and no '.join(missing)}: name a run folder, or what simulate --out wrote")
    for folder in folders:
        _require_step_or_run(folder)
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


def _require_step_or_run(path: Path) -> None:
    """Raise ConfigError for a folder without a timeline or a profile that is no run either, whatever the other is."""
    if path.is_dir() and not (path / "timeline.npz").is_file() and not any(Run(path).timelines.glob("*.json.gz")):
        read_manifest(Run(path))


def _is_plain_run(path: Path) -> bool:
    """Return whether `path` is the folder of a run of which no step was profiled."""
    run = Run(path)
    return run.manifest.is_file() and not any(run.timelines.glob("*.json.gz"))


def _compare_runs(folders: Sequence[Path]) -> RunComparisonResult:
    a, b = (Run(folder) for folder in folders)
    (of_a, steps_a), (of_b, steps_b) = read_steps(a), read_steps(b)
    for folder, one in zip(folders, (steps_a, steps_b), strict=True):
        if not len(one):
            raise ConfigError(f"{folder} has no finished step: name a run that has trained")
    found = compare_runs((str(folders[0]), str(folders[1])), (of_a, of_b), (steps_a, steps_b))
    return viewed(RunComparisonResult, found)


class ComparisonResult(PlottedResult, Comparison):
    """Two steps with their views. Data frame: a row for each operation. Plot: parts."""

    _page = compare_page

    def to_html(self, file: Path | str) -> None:
        """Write the comparison as one page that needs no network."""
        names = (self.a.source.place, self.b.source.place)
        write_comparison_html(names, {"parts": self.plot()}, self._page(), Path(file))

    def _summary(self) -> str:
        return f"Comparison {self.a.source.place}, {self.b.source.place}: {_steps(self.a.step_s, self.b.step_s)}"

    def _rows(self) -> list[dict[str, Any]]:
        return [
            one.model_dump(exclude={"a", "b"})
            | {"a_s": one.a.total_s, "b_s": one.b.total_s, "a_count": one.a.count, "b_count": one.b.count}
            for one in self.operations
        ]

    def _piped_width(self) -> int:
        return 120

    def _figures(self) -> Mapping[str, Callable[[], Any]]:
        parts = {"A": self.a.parts, "B": self.b.parts}
        return {"parts": partial(parts_figure, parts, shown_parts(parts))}


class RunComparisonResult(PlottedResult, RunComparison):
    """Two runs with their views. Data frame: a row for each of them. Plots: a curve of each metric, the loss first."""

    _page = run_comparison_page

    def to_html(self, file: Path | str) -> None:
        """Write the comparison as one page that needs no network."""
        plots = {name: figure() for name, figure in self._figures().items()}
        write_comparison_html((self.a.name, self.b.name), plots, self._page(), Path(file))

    def _summary(self) -> str:
        a, b = self.a, self.b
        settings = counted(len(self.changed_settings), "setting")
        steps = _steps(a.median_step_s, b.median_step_s)
        return f"Comparison {a.name}, {b.name}: {steps}, {settings} differ, {self._losses()}"

    def _rows(self) -> list[dict[str, Any]]:
        return [self.a.model_dump(), self.b.model_dump()]

    def _figures(self) -> Mapping[str, Callable[[], Any]]:
        runs = {side: read_metrics(Run(one.name)) for side, one in (("A", self.a), ("B", self.b))}
        names = [name for name in CURVES if any(has_curve(metrics, name) for metrics in runs.values())]
        return {name: partial(compared_curve_figure, runs, name) for name in names}

    def _losses(self) -> str:
        if not self.num_common_steps:
            return "no step in common"
        layouts = "" if self.first_other_layout is None else " in different layouts"
        return (
            f"losses bitwise equal{layouts}"
            if self.first_difference is None
            else f"losses differ from step {self.first_difference}"
        )


def _steps(a_s: float, b_s: float) -> str:
    change = f" ({100 * (b_s / a_s - 1):+.1f} %)" if a_s else ""
    return f"{format_duration(a_s)}/step and {format_duration(b_s)}/step{change}"
