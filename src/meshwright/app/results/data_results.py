"""What `mw.datasets` returns: data types of prepared and examined data with their views."""

from typing import Any

from meshwright.app.results.result import Result
from meshwright.pages.tables.data_table import preparation_page, preview_page, statistics_page, verification_page
from meshwright.spec.data_findings import DataPreview, DataStatistics, DataVerification, Preparation
from meshwright.units import counted, format_count


class PreparationResult(Result, Preparation):
    """Tokens that were prepared. Data frame: a row for each source."""

    _page = preparation_page

    def _summary(self) -> str:
        num_missing = sum(one.num_parts_missing for one in self.sources)
        if num_missing:
            return f"Preparation: {counted(num_missing, 'part')} missing"
        num_tokens = sum(one.num_tokens or 0 for one in self.sources)
        return f"Preparation: {format_count(num_tokens)} tokens" if self.is_complete else "Preparation: to be joined"

    def _rows(self) -> list[dict[str, Any]]:
        return [one.to_dict() for one in self.sources]


class StatisticsResult(Result, DataStatistics):
    """Sizes of a job's data. Data frame: a row for each range of document lengths, or one row without text."""

    _page = statistics_page

    def _summary(self) -> str:
        samples = counted(self.num_training_samples, "training sample")
        return f"Statistics of {self.source}: {samples}, {self.epochs:.3g} epochs"

    def _rows(self) -> list[dict[str, Any]]:
        rows = [{"source": one.source, **length.to_dict()} for one in self.sources for length in one.lengths]
        return rows or [{"source": self.source, "num_training_samples": self.num_training_samples}]


class PreviewResult(Result, DataPreview):
    """Samples as text. Data frame: a row for each segment, or for each sample without text."""

    _page = preview_page

    def _summary(self) -> str:
        return f"Preview of {self.source}: samples {', '.join(str(one.sample) for one in self.samples)}"

    def _rows(self) -> list[dict[str, Any]]:
        rows = []
        for one in self.samples:
            rows += [{"sample": one.sample, **segment.to_dict()} for segment in one.segments] or [
                {"sample": one.sample, "shapes": one.shapes}
            ]
        return rows


class DataVerificationResult(Result, DataVerification):
    """Data that was verified. Data frame: a row for each problem."""

    _page = verification_page

    def _summary(self) -> str:
        found = f"{counted(self.num_problems, 'problem')} {self.scope}".rstrip()
        return f"Verification of {self.source}: {found}"

    def _rows(self) -> list[dict[str, Any]]:
        return [one.to_dict() for one in self.problems]
