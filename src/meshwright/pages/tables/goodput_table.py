"""Where the time of a run went, cause by cause."""

from collections.abc import Iterator

from rich.console import RenderableType

from meshwright.pages.tables.page_table import PageTable, percent
from meshwright.spec.run.goodput import Goodput
from meshwright.units import format_duration

CAUSES = {
    "productive_s": "steps that count",
    "repeated_s": "steps done again or cut off",
    "skipped_s": "skipped steps",
    "data_wait_s": "waiting for data",
    "checkpoint_s": "checkpoints",
    "validation_s": "validation",
    "start_up_s": "start",
    "restart_s": "restarts",
    "hang_s": "hangs",
    "stopped_s": "stopped, no launcher",
    "other_s": "other, between steps",
}
"""What each field of Goodput is called on a page."""


def goodput_page(found: Goodput) -> Iterator[RenderableType]:
    """Yield the share and a row for each cause; what took no time is left out."""
    yield f"goodput {percent(found.share)} of {format_duration(found.total_s)}"
    table = PageTable("where the run's time went", "time#", "share#")
    for name, words in CAUSES.items():
        if (seconds := getattr(found, name)) > 0:
            table.add_row(words, format_duration(seconds), percent(seconds / found.total_s))
    yield table
