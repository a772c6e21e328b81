"""Two runs or two steps next to each other as one HTML file: their plots, then the tables of the command."""

from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from meshwright.pages.html.html_page import paragraph, plot, rich_table, section, write_page
from meshwright.pages.html.run_html import CURVES

_STEP = {"parts": ("Where the steps go", "By component, the mean of the ranks.")}


def write_comparison_html(
    names: tuple[str, str], plots: Mapping[str, Any], page: Iterable[RenderableType], file: Path
) -> None:
    """Write the page of A and B to `file`: `plots` by name, then the parts of the command's page."""
    title = f"A {names[0]}, B {names[1]}"
    titles = {name: (each, "") for name, (each, _) in CURVES.items()} | _STEP
    drawn = [section(*titles[name], plot(figure)) for name, figure in plots.items()]
    parts = [rich_table(part) if isinstance(part, Table) else paragraph(str(part)) for part in page if part != ""]
    write_page(title, [f"<h1>{escape(title)}</h1>", *drawn, section("In figures", "", "".join(parts))], file)
