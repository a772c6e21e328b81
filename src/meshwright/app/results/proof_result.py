"""ProofResult: what `mw.prove` returns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.text import Text

from meshwright.app.results.result import Result
from meshwright.prover.table import changes_text, notes, proof_table, reasons
from meshwright.spec.layout.layout_text import layout_text
from meshwright.spec.run.proof import Proof
from meshwright.units import counted

if TYPE_CHECKING:
    from rich.console import RenderableType


class ProofResult(Result, Proof):
    """A proof with its views. Data frame: a row for each layout."""

    def _summary(self) -> str:
        wrong = sum(not one.holds for one in self.layouts)
        outcome = f"{wrong} of {counted(len(self.layouts), 'layout')} do not hold"
        if not wrong:
            outcome = f"{counted(len(self.layouts), 'layout')}, all hold"
        return f"Proof {self.job.model.source}: {outcome}, {counted(self.num_steps, 'step')} in {self.precision}"

    def _page(self) -> Iterator[RenderableType]:
        yield proof_table(self)
        yield ""
        for line in (*notes(self), changes_text(self)):
            yield Text(line, style="dim")

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {
                "layout": layout_text(one.layout),
                "num_ranks": one.layout.num_ranks,
                "holds": one.holds,
                **{difference.kind: difference.relative for difference in one.differences},
                "share_of_bar": None if one.worst is None else one.worst.share,
                "reasons": reasons(one),
                "took_s": one.took_s,
            }
            for one in self.layouts
        ]

    def _piped_width(self) -> int:
        return proof_table(self).natural_width
