"""page_console() and print_page(): where and how the pages of a result are printed, within the width that there is."""

import os
import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.log import MIN_WIDTH
from meshwright.pages.tables.page_table import break_words, cell_text

_BEFORE_LINE = re.compile(r"\s*\S.*?\s{2,}|\s*- |\s*")
"""What a line begins with, below which its other lines do not begin: a label with a gap behind it, or a dash."""


def page_console(piped_width: int = 80, **options: Any) -> Console:
    """Return where a result is drawn: as wide as COLUMNS says, or else as the terminal, or where standard output is
    none, `piped_width`. `options` are those of rich's Console.
    """
    console = Console(highlight=False, **options)
    is_piped = not os.environ.get("COLUMNS", "").isdigit() and not console.is_terminal
    console.width = piped_width if is_piped else max(console.width, MIN_WIDTH)
    return console


def print_page(console: Console, parts: Iterable[RenderableType], width: int | None = None) -> None:
    """Print parts of a page, in `width` columns if that is given: a str has markup and is wrapped between words; so is
    a Text, but not where a program reads it, which searches lines.
    """
    is_piped = width is None and not console.is_terminal and not os.environ.get("COLUMNS", "").isdigit()
    if width is not None:
        console.width = width
    for part in parts:
        if isinstance(part, Text) and is_piped:
            console.print(part, soft_wrap=True)
        elif isinstance(part, str | Text):
            for line in cell_text(part).split("\n", allow_blank=True) or [Text()]:
                console.print(_hanging(line, console.width))
        else:
            console.print(part)


def _hanging(line: Text, width: int) -> RenderableType:
    """Return a line whose wrapped parts are indented to what follows its label or dash."""
    if line.cell_len <= width:
        return line
    before = _BEFORE_LINE.match(line.plain)
    indent = before.end() if before and before.end() < width // 2 else 0
    label, rest = line.divide([indent]) if indent else (Text(), line)
    rest = break_words(rest, width - indent)
    if not indent:
        return rest
    grid = Table.grid()
    grid.add_column(width=indent, no_wrap=True)
    grid.add_column(width=width - indent)
    grid.add_row(label, rest)
    return grid
