"""page_console(): where the pages of a result are printed."""

from __future__ import annotations

import os
from typing import Any

from rich.console import Console


def page_console(least_width: int = 0, piped_width: int = 0, **options: Any) -> Console:
    """Return where a result is drawn: as wide as COLUMNS says, or else as the terminal and at least `least_width`;
    where standard output is no terminal, `piped_width`. `options` are those of rich's Console.
    """
    console = Console(highlight=False, **options)
    if not os.environ.get("COLUMNS", "").isdigit():
        console.width = max(console.width, least_width) if console.is_terminal or not piped_width else piped_width
    return console
