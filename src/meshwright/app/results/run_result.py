"""TrainedRun and ReportResult: what `mw.train` and `mw.report` return."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from meshwright.app.results.result import PlottedResult
from meshwright.errors import ConfigError, ExitCode
from meshwright.evaluation.dataset.own_run import read_manifest, read_steps
from meshwright.pages.figures.run_figures import curve_figure, has_curve, measured_waterfall_figure, parts_figure
from meshwright.pages.html.run_html import CURVES, shown_parts, write_run_html
from meshwright.pages.tables.run_table import run_page, run_summary_table
from meshwright.spec.layout.layout_text import layout_text
from meshwright.spec.run.run import Run, how_to_profile
from meshwright.spec.run.run_comparison import run_summary
from meshwright.spec.run.run_report import RunMetrics, RunReport, read_metrics
from meshwright.units import counted, format_duration

_COLUMNS = ("step", *CURVES, "attempt")


class ReportResult(PlottedResult, RunReport):
    """A run's report with its views. Data frame: a row for each step. Plots: waterfall, parts, curves of metrics."""

    def to_json(self) -> str:
        """Return what `meshwright report --json` prints."""
        by_component = {name: one.to_dict() for name, one in self.parts.items()}
        predicted = None if self.predicted is None else self.predicted.to_dict()
        record: dict[str, Any] = {"measured_step_s": self.measured_s, "predicted": predicted, "parts": by_component}
        record["waterfall"] = self.waterfall.to_dict()
        record["goodput"] = None if self.goodput is None else self.goodput.to_dict() | {"share": self.goodput.share}
        record["findings"] = [one.to_dict() for one in self.findings]
        record["num_steps"] = len(self.metrics)
        record["skipped_steps"] = self.metrics.steps_skipped.tolist()
        record["num_skips_cut_off"] = self.metrics.num_skips_cut_off
        record["timed_attempt"] = self.metrics.timed_attempt
        if self.untimed_layout is not None:
            record["untimed_layout"] = self.untimed_layout.to_dict()
        return json.dumps(record | ({} if self.example is None else {"rates_of": self.example}), indent=2)

    def to_html(self, file: Path | str) -> None:
        """Write the report as one page that needs no network."""
        write_run_html(self, Path(file))

    def _summary(self) -> str:
        text = (
            f"Report {self.folder}: {layout_text(self.layout.effective)}, {counted(len(self.metrics), 'step')}, "
            f"{format_duration(self.measured_s)}/step measured"
        )
        if self.predicted_s is None:
            return text
        # The rates of an example say little about this machine.
        off = f"{100 * (self.predicted_s / self.measured_s - 1):+.1f} %"
        how = off if self.example is None else "of an example machine: this one is not calibrated"
        return f"{text}, {format_duration(self.predicted_s)} predicted ({how})"

    def _page(self) -> Iterator[RenderableType]:
        yield from run_page(self, how_to_profile(self.manifest.job))

    def _rows(self) -> Mapping[str, Any]:
        return _columns(self.metrics)

    def _figures(self) -> Mapping[str, Callable[[], Any]]:
        steps: dict[str, Callable[[], Any]] = {}
        if self.waterfall.predicted is not None or self.waterfall.source == "profile":
            steps["waterfall"] = partial(measured_waterfall_figure, self.waterfall)
        if self.parts:
            steps["parts"] = partial(parts_figure, self.parts, shown_parts(self.parts), self.measured_s)
        return steps | _curves(self.metrics, self.predicted_s)


@dataclass(frozen=True, repr=False)
class TrainedRun(PlottedResult):
    """How a run ended. Data frame: a row for each step. Plots: a curve of each metric, the loss first."""

    folder: Path
    exit_code: ExitCode

    @property
    def metrics(self) -> RunMetrics:
        """Return what the run wrote of its steps, those of earlier attempts too; raises ConfigError where none are."""
        return read_metrics(Run(self.folder))

    def to_json(self) -> str:
        """Return what `meshwright train --json` prints; raises ConfigError where no rank has started."""
        results = read_manifest(Run(self.folder)).results
        record = {"exit_code": self.exit_code.value, "run_dir": str(self.folder), "results": results}
        return json.dumps(record, indent=2)

    def _summary(self) -> str:
        how = f"Run {self.folder}: exit code {self.exit_code.value} ({self.exit_code.name.lower().replace('_', ' ')})"
        metrics = self._metrics()
        if metrics is None:
            return f"{how}, no finished step"
        return f"{how}, {counted(len(metrics), 'step')}, last loss {metrics.loss[-1]:.4f}"

    def _page(self) -> Iterator[RenderableType]:
        yield Text(self._summary())
        metrics = self._metrics()
        if metrics is not None:
            yield run_summary_table(run_summary(str(self.folder), *read_steps(Run(self.folder))))

    def _rows(self) -> Mapping[str, Any]:
        return _columns(self.metrics)

    def _figures(self) -> Mapping[str, Callable[[], Any]]:
        metrics = self._metrics()
        return {} if metrics is None else _curves(metrics)

    def _metrics(self) -> RunMetrics | None:
        """Return the metrics; None where no step has finished."""
        try:
            return self.metrics if len(self.metrics) else None
        except ConfigError:
            return None


def _columns(metrics: RunMetrics) -> Mapping[str, Any]:
    return {name: getattr(metrics, name) for name in _COLUMNS}


def _curves(metrics: RunMetrics, predicted_s: float | None = None) -> dict[str, Callable[[], Any]]:
    """Return what draws the curve of each metric that the run has."""
    predicted = {"step_s": predicted_s}
    names = [name for name in CURVES if has_curve(metrics, name)]
    return {name: partial(curve_figure, metrics, name, predicted.get(name)) for name in names}
