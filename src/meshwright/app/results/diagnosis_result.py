"""DiagnosisResult: what `mw.diagnose` returns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import Field

from meshwright.app.results.result import Result
from meshwright.pages.tables.diagnosis_table import diagnosis_page
from meshwright.spec.run.diagnosis import Diagnosis

if TYPE_CHECKING:
    from rich.console import RenderableType


class DiagnosisResult(Result, Diagnosis):
    """A diagnosis with its views. Data frame: a row for each rank."""

    folder: str = Field("", exclude=True)
    """The run's folder."""

    def _summary(self) -> str:
        return f"Diagnosis {self.folder}: {self.verdict}: {self.headline}"

    def _page(self) -> Iterator[RenderableType]:
        return diagnosis_page(self.folder, self)

    def _rows(self) -> list[dict[str, Any]]:
        return [one.to_dict() for one in self.ranks]

    def _piped_width(self) -> int:
        return 140
