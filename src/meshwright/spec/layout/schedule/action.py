"""Action: what a pipeline rank does with one microbatch on one stage, and how a schedule of them is written.

The text is torch's: `2F0` is the forward of microbatch 0 on stage 2, `3SEND_F1` the send of what stage 3 made of
microbatch 1. So a schedule can travel between torch and here as a CSV file.

A schedule as a CSV file, in torch's form: one row for each pipeline rank, one action in each cell.
Empty cells are bubbles and mean nothing here. Sends and receives are not written: they follow from the order.
"""

import csv
import io
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple, cast

from meshwright.errors import ConfigError
from meshwright.spec.layout.layout import Layout

Kind = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]

COMPUTE_KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")
"""Forward; whole backward; backward to the inputs; backward to the weights."""
COMMUNICATION_KINDS: tuple[Kind, ...] = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
"""F: a stage's output goes to the next stage. B: the gradient of its input goes to the one before."""

ACTION_MARK = "action "
"""What the name of a profiler's range begins with that an action runs in, before the action's own text."""

_ACTION = re.compile(rf"(\d+)({'|'.join(COMPUTE_KINDS + COMMUNICATION_KINDS)})(\d+)")
_OVERLAPPED = re.compile(r"\((.*)\)OVERLAP_F_B")


class Action(NamedTuple):
    """One thing that a pipeline rank does: what, on which stage, with which microbatch."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


def parse_action(text: str) -> Action:
    """Return the action that `text` names; raises ConfigError for one that does not exist."""
    match = _ACTION.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"{text!r} is no action of a pipeline: write the stage, one of {', '.join(COMPUTE_KINDS)}, and the "
            "microbatch, such as 2F0"
        )
    return Action(cast(Kind, match[2]), int(match[1]), int(match[3]))


def parse_cell(text: str) -> tuple[Action, ...]:
    """Return what one cell of a schedule's table holds: nothing, an action, or torch's pair `(1F3;2B0)OVERLAP_F_B`.

    A pair becomes its two actions in order: which of them may overlap is for the runtime to see.
    """
    text = text.strip()
    overlapped = _OVERLAPPED.fullmatch(text)
    parts = overlapped[1].split(";") if overlapped else [text] if text else []
    return tuple(parse_action(part) for part in parts)


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
