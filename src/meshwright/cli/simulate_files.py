"""The files of `meshwright simulate`: checked before anything is traced, written after the simulation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from meshwright.spec.step.dry_run import DryRun
    from meshwright.spec.trace.timeline import Timeline
    from meshwright.spec.trace.traces import Traces


class Files(NamedTuple):
    """What to write; None of what is not asked for."""

    html: Path | None
    perfetto: Path | None
    out: Path | None


def files_of(given: dict[str, Any]) -> Files:
    """Return the files to write, all of them with --out; raises before anything is traced where they cannot be."""
    from meshwright.cli.output_files import require_file, require_folder
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


def write_files(run: DryRun, timeline: Timeline | None, traces: Traces, files: Files) -> None:
    """Write the files that are asked for."""
    from meshwright.pages.figures.message_arrows import messages_of
    from meshwright.pages.html.dry_run_html import write_html
    from meshwright.pages.perfetto import write_perfetto

    if files.out is not None:
        (files.out / "dry_run.json").write_text(run.to_json() + "\n", encoding="utf-8")
        if timeline is not None:
            timeline.save(files.out / "timeline.npz")
    if files.html is not None:
        write_html(run, timeline, files.html)
    if files.perfetto is not None and timeline is not None:
        write_perfetto(timeline, files.perfetto, messages_of(timeline, traces))
