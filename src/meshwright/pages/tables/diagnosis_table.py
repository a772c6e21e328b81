"""A diagnosis on the terminal: the finding, what it rests on, what to do, and where every rank is."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.markup import escape

from meshwright.pages.tables.page_table import PageTable
from meshwright.spec.run.rank_records import Diagnosis
from meshwright.units import format_duration

_STYLES = {"ended": "green", "moving": "green", "unknown": "yellow"}
_MOST_RANKS = 32


def diagnosis_page(name: str, diagnosis: Diagnosis) -> Iterator[RenderableType]:
    """Yield the parts of the page; of many ranks those to blame and the longest silent are shown."""
    style = _STYLES.get(diagnosis.verdict, "bold red")
    yield f"[bold]{escape(name)}[/]: [{style}]{diagnosis.verdict}[/]"
    yield escape(diagnosis.headline)
    for sentence in diagnosis.evidence:
        yield f"- {escape(sentence)}"
    yield ""
    yield _table(diagnosis)
    yield f"What to do: {escape(diagnosis.advice)}"


def _table(diagnosis: Diagnosis) -> PageTable:
    table = PageTable("rank#", "process", "silent#", "step#", "phase", "doing", "waits for")
    first = sorted(diagnosis.ranks, key=lambda one: (one.rank not in diagnosis.culprits, -one.silent_s))[:_MOST_RANKS]
    for one in sorted(first, key=lambda one: one.rank):
        row = (
            str(one.rank),
            one.process,
            format_duration(one.silent_s),
            str(one.step),
            one.phase,
            escape(one.doing),
            ", ".join(map(str, one.waits_for)) or "-",
        )
        table.add_row(*row, style="red" if one.rank in diagnosis.culprits else None)
    if len(diagnosis.ranks) > len(first):
        table.caption = f"{len(diagnosis.ranks) - len(first)} more ranks: --json has them all"
    return table
