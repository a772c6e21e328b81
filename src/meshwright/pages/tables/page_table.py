"""PageTable: a table that is never wider than the terminal, and breaks no figure and no word."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from meshwright.units import format_duration, label_of

_GAP = _INDENT = 2
_LEAST_WORDS = 24
"""Columns of the terminal that words take at least: in fewer, a sentence becomes a list of words."""
_MAY_END_LINE = ",./:=_-"
"""Behind which a word is broken that is longer than a line."""


class _Width(NamedTuple):
    """What a column needs."""

    place: int
    natural: int
    least: int


class PageTable(Table):
    """A table without lines: figures, which are never cut, and words, which wrap between words.

    Where its columns do not fit next to each other, those of words move below each row, the widest first, and then the
    last ones of figures; several are labelled "header: cell". A first column that moves is a line above the row; a
    column whose overflow is "crop" is left out.
    """

    def __init__(self, *headers: str) -> None:
        """Make a table whose headers that end in # are of figures."""
        super().__init__(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
        for header in headers:
            is_figure = header.endswith("#")
            justify = "right" if is_figure else "left"
            self.add_column(header.rstrip("#"), justify=justify, no_wrap=is_figure)  # type: ignore[arg-type]

    @property
    def natural_width(self) -> int:
        """Return the width at which nothing is wrapped."""
        return _total([self._width(place).natural for place in range(len(self.columns))])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Yield the table's lines."""
        width = options.max_width
        kept, moved = self._arrange(width)
        widths = dict(zip((one.place for one in kept), _shared(kept, width), strict=True))
        below, has_line_above = sorted(moved - {0}), 0 in moved
        has_labels = len(below) > 1
        if self.title:
            yield cell_text(self.title, "bold")
        if has_line_above:
            yield break_words(cell_text(self.columns[0].header, "bold"), width)
        headers = [cell_text(column.header, "bold") for column in self.columns]
        yield self._line(headers, widths)
        if below and not has_labels:
            yield _indented(headers[below[0]], width)
        for row, cells in zip(self.rows, zip(*(column.cells for column in self.columns), strict=True), strict=True):
            texts = [cell_text(cell, str(row.style or "")) for cell in cells]
            if has_line_above and texts[0].plain:
                yield break_words(texts[0], width)
            yield self._line(texts, widths)
            for same in self._lines_below(below):
                named = [
                    (headers[place].plain.replace("\n", " ") if has_labels else "", texts[place]) for place in same
                ]
                parts = [Text(f"{name}: " if name else "").append_text(text) for name, text in named if text.plain]
                if parts:
                    yield _indented(Text(", ").join(parts), width)
        if self.caption:
            yield cell_text(self.caption, "dim italic")

    def _lines_below(self, places: Sequence[int]) -> list[list[int]]:
        """Return the places by line: figures share one, words have one each."""
        figures = [place for place in places if self.columns[place].no_wrap]
        return [[place] for place in places if place not in figures] + ([figures] if figures else [])

    def _line(self, texts: Sequence[Text], widths: dict[int, int]) -> Table:
        """Return what a row, or the headers, have next to each other."""
        line = Table.grid(padding=(0, _GAP, 0, 0))
        for place, width in widths.items():
            column = self.columns[place]
            line.add_column(justify=column.justify, width=width, no_wrap=column.no_wrap, vertical=column.vertical)
        line.add_row(*(break_words(texts[place], width) for place, width in widths.items()))
        return line

    def _arrange(self, max_width: int) -> tuple[list[_Width], set[int]]:
        """Return the columns that stay next to each other in `max_width`, and the places of those that move."""
        kept = [self._width(place) for place in range(len(self.columns))]
        while len(kept) > 1 and _total([min(one.least, max_width) for one in kept]) > max_width:
            kept.remove(self._first_to_move(kept, max_width))
        moved = set(range(len(self.columns))) - {one.place for one in kept}
        return kept, {place for place in moved if self.columns[place].overflow != "crop"}

    def _first_to_move(self, kept: Sequence[_Width], max_width: int) -> _Width:
        """Return a column that may be left out, or else of words, or else the last; the first one if it is too wide."""
        dispensable = [one for one in kept if self.columns[one.place].overflow == "crop"]
        words = [one for one in kept if not self.columns[one.place].no_wrap]
        words = [one for one in words if one.place or one.least > max_width // 2]
        return max(dispensable or words or kept[-1:], key=lambda one: (one.least, one.place))

    def _width(self, place: int) -> _Width:
        column = self.columns[place]
        plain = [cell_text(cell).plain for cell in (column.header, *column.cells)]
        natural = max(len(line) for text in plain for line in text.split("\n"))
        longest = max(len(word) for text in plain for word in ["", *text.split()])
        return _Width(place, natural, natural if column.no_wrap else max(longest, min(natural, _LEAST_WORDS)))


def labels_of(*keys: str) -> tuple[str, ...]:
    """Return the headers of columns of figures: what tables call these keys."""
    return tuple(f"{label_of(key)}#" for key in keys)


def percent(share: float, digits: int = 1) -> str:
    """Return a share in per cent."""
    return f"{100 * share:.{digits}f} %"


def signed_percent(change: float) -> str:
    """Return a relative change in per cent with its sign."""
    return f"{100 * change:+.1f} %"


def signed(difference_s: float) -> str:
    """Return a difference with its sign; below a nanosecond are the ends of sums that differ in their order."""
    return (
        "0 s" if abs(difference_s) < 1e-9 else f"{'+' if difference_s > 0 else '-'}{format_duration(abs(difference_s))}"
    )


def cell_text(cell: RenderableType, style: str = "") -> Text:
    """Return a cell or a header, which may have markup, as text."""
    text = cell.copy() if isinstance(cell, Text) else Text.from_markup(str(cell))
    if style:
        text.stylize_before(style)
    return text


def _indented(text: Text, width: int) -> Padding:
    return Padding(break_words(text, width - _INDENT), (0, 0, 0, _INDENT))


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _shared(columns: Sequence[_Width], max_width: int) -> list[int]:
    """Return the width of each column: what it would take, less where they are too wide together, the widest first."""
    widths = [one.natural for one in columns]
    least = [min(one.least, max_width) for one in columns]
    while _total(widths) > max_width:
        place = max(range(len(widths)), key=lambda place: (widths[place] > least[place], widths[place]))
        widths[place] -= 1
    return widths


def break_words(text: Text, width: int) -> Text:
    """Return the text with line breaks in words that are longer than `width`, behind punctuation if they have any."""
    cuts = []
    for word in re.finditer(r"\S+", text.plain):
        start = word.start()
        while word.end() - start > width:
            last = start + width
            start = next((at for at in range(last, start, -1) if text.plain[at - 1] in _MAY_END_LINE), last)
            cuts.append(start)
    return Text("\n").join(text.divide(cuts)) if cuts else text
