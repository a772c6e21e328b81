"""What `mw.datasets` returns: data types of prepared and examined data with their views."""

from typing import Any

from meshwright.app.results.result import Result
from meshwright.pages.tables.data_table import preparation_page
from meshwright.spec.data_findings import Preparation
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
