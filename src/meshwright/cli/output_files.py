"""Files that a command writes: refused before the work whose result they hold, not after it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright.errors import ConfigError

if TYPE_CHECKING:
    from meshwright.spec.step.simulation_report import SimulationReport
    from meshwright.spec.trace.timeline import Timeline
    from meshwright.spec.trace.traces import Traces


def require_file(option: str, file: Path) -> None:
    """Raise ConfigError unless `file` can be written: its folder, which is never made, exists and takes files."""
    if not file.parent.is_dir():
        raise ConfigError(f"{option} {file}: there is no folder {file.parent}: make it, or name one that exists")
    require_writable(option, file.parent)


def require_page(option: str, file: Path) -> None:
    """Raise as `require_file` does, and UnsupportedError where plotly, which draws the page, is not installed."""
    from meshwright.extras import import_extra
    from meshwright.pages.html.html_page import PURPOSE

    require_file(option, file)
    import_extra("plotly", PURPOSE)


def require_folder(option: str, folder: Path) -> None:
    """Make `folder` if it does not exist; raises ConfigError where it cannot be made or takes no files."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{option} {folder} is a file: name a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _refused(option, folder, error) from error
    require_writable(option, folder)


def require_writable(option: str, folder: Path) -> None:
    """Raise ConfigError unless a file can be made in `folder`; none is left there."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise _refused(option, folder, error) from error


def _refused(option: str, folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{option}: cannot write to the folder {folder} ({error.strerror or error}): name one that can be written"
    )


class Files(NamedTuple):
    """What to write; None of what is not asked for."""

    html: Path | None
    perfetto: Path | None
    out: Path | None


def files_of(given: dict[str, Any]) -> Files:
    """Return the files to write, all of them with --out; raises before anything is traced where they cannot be."""
    from meshwright.extras import import_extra
    from meshwright.pages.html.html_page import PURPOSE

    html, perfetto, out = given["html"], given["perfetto"], given["out"]
    if out is not None:
        require_folder("--out", out)
        html, perfetto = html or out / "report.html", perfetto or out / "timeline.perfetto.json.gz"
    for option, file in (("--html", given["html"]), ("--perfetto", given["perfetto"])):
        if file is not None:
            require_file(option, file)
    if html is not None:
        import_extra("plotly", PURPOSE)
    return Files(html, perfetto, out)


def write_files(run: SimulationReport, timeline: Timeline | None, traces: Traces, files: Files) -> None:
    """Write the files that are asked for."""
    from meshwright.pages.figures.intervals import messages_of
    from meshwright.pages.html.simulation_html import write_html
    from meshwright.pages.perfetto import write_perfetto

    if files.out is not None:
        (files.out / "simulation.json").write_text(run.to_json() + "\n", encoding="utf-8")
        if timeline is not None:
            timeline.save(files.out / "timeline.npz")
    if files.html is not None:
        write_html(run, timeline, files.html)
    if files.perfetto is not None and timeline is not None:
        write_perfetto(timeline, files.perfetto, messages_of(timeline, traces))
