"""Pages as one HTML file each that needs no network: cards, sections, tables, and plots that zoom."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.extras import import_extra

PURPOSE = "a report as a page"
_TEMPLATE = Path(__file__).with_name("page.html")
_CONFIG = {
    "displaylogo": False,
    "displayModeBar": "hover",
    "responsive": True,
    "modeBarButtonsToRemove": ["select2d", "lasso2d"],
}


def write_page(title: str, parts: Iterable[str], file: Path) -> None:
    """Write `parts`, which are HTML, as a page with plotly in it; MissingExtraError without plotly."""
    plotly_js = import_extra("plotly.offline", PURPOSE).get_plotlyjs()
    page = Template(_TEMPLATE.read_text(encoding="utf-8"))
    text = page.substitute(title=escape(title), plotly=plotly_js, body="\n".join(parts))
    file.write_text(text, encoding="utf-8")


def cards(named: Mapping[str, str], bad: str = "") -> str:
    """Return large figures side by side; those whose name begins with `bad`, if that is given, in red."""
    marks = (" bad" if bad and name.startswith(bad) else "" for name in named)
    drawn = (
        f'<div class="card{mark}"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for mark, (name, value) in zip(marks, named.items(), strict=True)
    )
    return f'<div class="cards">{"".join(drawn)}</div>'


def section(title: str, note: str, inner: str) -> str:
    """Return a titled part of the page; `inner` is HTML."""
    return f'<section><h2>{escape(title)}</h2><p>{escape(note)}</p><div class="wide">{inner}</div></section>'


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; a header that ends in # is of numbers."""
    return _table([text.rstrip("#") for text in headers], ["number" * text.endswith("#") for text in headers], rows)


def _table(headers: Sequence[str], kinds: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose columns are of `kinds`: number, whole (never broken) or neither."""
    marks = [f' class="{kind}"' if kind else "" for kind in kinds]
    head = "".join(f"<th{mark}>{escape(text)}</th>" for mark, text in zip(marks, headers, strict=True))
    lines = ("".join(f"<td{mark}>{escape(cell)}</td>" for mark, cell in zip(marks, row, strict=True)) for row in rows)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def rich_table(drawn: Table) -> str:
    """Return a terminal's table as one of the page."""
    columns = drawn.columns
    kinds = ["number" if one.justify == "right" else "whole" * one.no_wrap for one in columns]
    rows = zip(*(map(_plain, one.cells) for one in columns), strict=True)
    title = f"<p><b>{escape(_plain(drawn.title))}</b></p>" if drawn.title else ""
    return title + _table([_plain(one.header) for one in columns], kinds, rows)


def paragraph(text: str) -> str:
    """Return a line of a terminal's page as a paragraph."""
    return f"<p>{escape(_plain(text))}</p>"


def _plain(cell: RenderableType) -> str:
    """Return a cell, or a line, without its markup."""
    return Text.from_markup(cell).plain if isinstance(cell, str) else str(cell)


def plot(figure: Any) -> str:
    """Return a plotly figure as HTML."""
    text: str = figure.to_html(full_html=False, include_plotlyjs=False, config=_CONFIG)
    return text
