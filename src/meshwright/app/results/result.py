"""Result: a value as a notebook and a terminal show it. A result derives from the data type whose fields it has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import Field

from meshwright.app.arguments import checked
from meshwright.errors import ConfigError
from meshwright.extras import import_extra
from meshwright.log import MIN_WIDTH
from meshwright.units import GiB, format_bytes, format_duration

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

Rows = Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""Of a data frame: one mapping a row, or the columns by name."""

_HTML_WIDTH = 120
_HTML = '<pre style="white-space:pre;overflow-x:auto;line-height:1.3">{code}</pre>'

SomeResult = TypeVar("SomeResult", bound="Result")


class Result(ABC):
    """A value that is shown as one line, as the text of its command, as a data frame, and as HTML in a notebook."""

    @abstractmethod
    def _summary(self) -> str:
        """Return the essentials in one line, the kind of result first."""

    @abstractmethod
    def _page(self) -> Iterable[RenderableType]:
        """Return the parts of what the command prints, as print_page() takes them."""

    @abstractmethod
    def _rows(self) -> Rows:
        """Return what the data frame holds."""

    def _piped_width(self) -> int:
        """Return the columns that the page takes where there is no terminal."""
        return 80

    def __repr__(self) -> str:
        return f"<{self._summary()}>"

    def __str__(self) -> str:
        return self.table()

    @checked
    def table(self, width: Annotated[int, Field(ge=MIN_WIDTH)] | None = None) -> str:
        """Return the text that the command prints, without colours; `width` in columns, None for the terminal's."""
        from meshwright.pages.console import page_console

        text = StringIO()
        self._print(page_console(self._piped_width(), file=text, color_system=None, force_jupyter=False), width)
        return text.getvalue().rstrip("\n")

    def show(self) -> None:
        """Print the table, in colours on a terminal."""
        from meshwright.pages.console import page_console, print_page

        print_page(page_console(self._piped_width(), force_jupyter=False), self._page())

    def to_pandas(self) -> Any:
        """Return a pandas.DataFrame; raises UnsupportedError that names the extra to install without pandas."""
        return import_extra("pandas", "a data frame").DataFrame(self._rows())

    def _repr_html_(self) -> str:
        from rich.console import Console

        console = Console(file=StringIO(), record=True, force_jupyter=False, highlight=False)
        self._print(console, max(_HTML_WIDTH, self._piped_width()))
        return console.export_html(inline_styles=True, code_format=_HTML)

    def _print(self, console: Console, width: int | None = None) -> None:
        from meshwright.pages.console import print_page

        print_page(console, self._page(), width)


class PlottedResult(Result):
    """A result with plots."""

    @abstractmethod
    def _figures(self) -> Mapping[str, Callable[[], Any]]:
        """Return the function of each plot by name, the most informative first."""

    @property
    def plots(self) -> tuple[str, ...]:
        """Return the names of the plots."""
        return tuple(self._figures())

    def plot(self, name: str | None = None) -> Any:
        """Return a plotly figure: one of `plots`, by default the first. Raises UnsupportedError without plotly."""
        figures = self._figures()
        if not figures:
            raise ConfigError(f"{self!r} has nothing to plot: see .table()")
        if name is not None and name not in figures:
            raise ConfigError(f"plot({name!r}): must be one of {', '.join(figures)}")
        return figures[next(iter(figures)) if name is None else name]()


def viewed(kind: Callable[..., SomeResult], value: object, **more: Any) -> SomeResult:
    """Return `value` as `kind`, a result that derives from its type; `more` are fields that `kind` adds."""
    return kind(**vars(value), **more)


def step_words(step_s: float, mfu: float | None) -> str:
    """Return a step time, and its MFU where that is known."""
    return f"{format_duration(step_s)}/step" + ("" if mfu is None else f", MFU {100 * mfu:.0f} %")


def memory_words(num_bytes: float, usable_bytes: float) -> str:
    """Return how much of a device is used: 51 of 80 GiB."""
    if num_bytes < GiB:
        return f"{format_bytes(num_bytes)} of {format_bytes(usable_bytes)}"
    return f"{num_bytes / GiB:.0f} of {usable_bytes / GiB:.0f} GiB"
