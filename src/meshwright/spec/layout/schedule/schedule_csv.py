"""A schedule as a CSV file, in torch's form: one row for each pipeline rank, one action in each cell.

Empty cells are bubbles and mean nothing here. Sends and receives are not written: they follow from the order.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path

from meshwright.errors import ConfigError
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.schedule.action import COMPUTE_KINDS, Action, parse_cell


def is_csv(layout: Layout) -> bool:
    """Return whether layout.schedule names a file and not a schedule known by name."""
    return layout.schedule.endswith(".csv")


def read_schedule(layout: Layout) -> str | None:
    """Return the text of the file that layout.schedule names, or None; raises ConfigError if it cannot be read."""
    if not is_csv(layout):
        return None
    try:
        return Path(layout.schedule).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f'layout.schedule = "{layout.schedule}" cannot be read ({error}): name an existing CSV file'
        ) from error


def orders_from_csv(text: str) -> tuple[tuple[Action, ...], ...]:
    """Return each rank's compute actions in order; raises ConfigError naming the cell that holds something else."""
    rows = [row for row in csv.reader(io.StringIO(text)) if row]
    return tuple(
        tuple(
            action
            for column, cell in enumerate(row, start=1)
            for action in _compute_actions(cell, f"row {number}, column {column}")
        )
        for number, row in enumerate(rows, start=1)
    )


def orders_to_csv(orders: Iterable[Iterable[Action]]) -> str:
    """Return the text that `orders_from_csv` and torch read back to the same orders."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([str(action) for action in order] for order in orders)
    return text.getvalue()


def _compute_actions(cell: str, place: str) -> tuple[Action, ...]:
    try:
        actions = parse_cell(cell)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error
    for action in actions:
        if action.kind not in COMPUTE_KINDS:
            raise ConfigError(
                f"{place}: {action} is a transfer, but a schedule's file holds {', '.join(COMPUTE_KINDS)} only: "
                "leave it out, sends and receives follow from the order"
            )
    return actions
