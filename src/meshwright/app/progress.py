"""elapsed(): what a command is doing, and for how long, on a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from meshwright.log import shows_progress


@contextmanager
def elapsed(text: str) -> Iterator[Callable[[str], None]]:
    """Show `text` and the time since then on stderr while the block runs; yield what replaces the text.

    Nothing is written where stderr is not a terminal, or no progress is wanted.
    """
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    console = Console(stderr=True)
    is_shown = console.is_terminal and shows_progress()
    with Progress(*columns, console=console, transient=True, disable=not is_shown) as progress:
        task = progress.add_task(text, total=None)
        yield lambda changed: progress.update(task, description=changed)
