"""SteplessResult: what `meshwright report` shows of a run that has not finished a step."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.markup import escape

from meshwright.app.results.result import Result
from meshwright.pages.tables.goodput_table import goodput_page
from meshwright.spec.run.goodput import Goodput
from meshwright.units import counted, format_duration


@dataclass(frozen=True, repr=False)
class SteplessResult(Result):
    """Where the time of a run without a finished step went. Data frame: one row, a column for each cause."""

    folder: Path
    num_starts: int
    """Times that its ranks were started."""
    goodput: Goodput

    def to_json(self) -> str:
        """Return what `meshwright report --json` prints."""
        goodput = self.goodput.to_dict() | {"share": self.goodput.share}
        return json.dumps({"num_starts": self.num_starts, "num_steps": 0, "goodput": goodput}, indent=2)

    def _summary(self) -> str:
        starts, total = counted(self.num_starts, "start"), format_duration(self.goodput.total_s)
        return f"Report {self.folder}: no step was finished, {starts} of the ranks in {total}"

    def _page(self) -> Iterator[RenderableType]:
        yield escape(f"{self._summary()}; `meshwright diagnose {self.folder}` and {self.folder}/logs say why")
        yield ""
        yield from goodput_page(self.goodput)

    def _rows(self) -> list[dict[str, Any]]:
        return [self.goodput.to_dict()]
