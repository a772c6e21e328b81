"""The waterfall of a step: from the time that physics allows to the time that is expected, cause by cause."""

from __future__ import annotations

from rich.table import Table

from meshwright.spec.step.estimate import Estimate
from meshwright.spec.step.step_decomposition import COMPONENT_NAMES
from meshwright.units import format_duration

MFU_MEANS = "MFU: model FLOPs (forward and backward once, causal attention halved) over the dense peak"
HFU_MEANS = "HFU: model FLOPs and recomputed FLOPs over the dense peak"
NO_PEAK = "MFU and HFU are unknown: so is this device's peak FLOP/s, and the first line is at its best measured rate"
_WIDTH = 22
_LEAST_SHARE = 0.0005


def waterfall(estimate: Estimate) -> Table:
    """Return a table with a row for each cause: its seconds, its share, and a bar from where the last one ended."""
    total_s, end_s = estimate.step.total_s, 0.0
    table = table_of("where the step goes", "time#", "share#", "")
    for name, seconds in estimate.step.to_dict().items():
        start_s, end_s = end_s, end_s + seconds
        if seconds >= _LEAST_SHARE * total_s:
            bar = _bar(start_s, end_s, total_s)
            table.add_row(COMPONENT_NAMES[name], format_duration(seconds), percent(seconds / total_s), bar)
    table.add_row("[bold]step", f"[bold]{format_duration(total_s)}", "[bold]100 %", "")
    return table


def percent(share: float, digits: int = 1) -> str:
    """Return a share in per cent."""
    return f"{100 * share:.{digits}f} %"


def plain_table() -> Table:
    """Return a table without lines, as all of a plan's are."""
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")


def table_of(*headers: str) -> Table:
    """Return a plain table: columns of a header that ends in # hold figures, which are never cut; words may wrap."""
    table = plain_table()
    for header in headers:
        if header.endswith("#"):
            table.add_column(header[:-1], justify="right", no_wrap=True)
        else:
            table.add_column(header, overflow="fold")
    return table


def _bar(start_s: float, end_s: float, total_s: float) -> str:
    start, end = (min(round(at_s / total_s * _WIDTH), _WIDTH) for at_s in (start_s, end_s))
    return f"[dim]{' ' * min(start, _WIDTH - 1)}[/]{'█' * (end - start) or '▏'}"
