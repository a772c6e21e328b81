"""The waterfall of a step: from the time that physics allows to the time that is predicted, cause by cause."""

from meshwright.pages.tables.page_table import PageTable, percent
from meshwright.spec.step.estimate import COMPONENT_NAMES, Estimate
from meshwright.spec.step.workload import MATMUL_DTYPE, Precision
from meshwright.units import format_duration

MFU_MEANS = "MFU: model FLOPs (forward and backward once, causal attention halved) over the dense peak"
PEAK_OF_FLOAT8 = "The peak is that of float8, for all model FLOPs: those outside of float8 layers, too"
"""What is said next to the MFU of a step in float8, which does not compare with one of bfloat16's peak."""
HFU_MEANS = "HFU: model FLOPs and recomputed FLOPs over the dense peak"
NO_PEAK = (
    "MFU and HFU are unknown because this device's peak FLOP/s is unknown; the first row uses its best measured rate"
)
NO_PEAK_OF_EXAMPLE = (
    "MFU and HFU are unknown because this device's peak FLOP/s is unknown; the first row uses the best rate that was "
    "measured on the example machine"
)
_EIGHTHS = " ▏▎▍▌▋▊▉"
_WIDTH = 22
_LEAST_SHARE = 0.0005


def waterfall(estimate: Estimate) -> PageTable:
    """Return a table with a row for each cause: its seconds, its share, and a bar from where the last one ended."""
    total_s, end_s = estimate.step.total_s, 0.0
    table = PageTable("where the step goes", "time#", "share#", "")
    table.columns[3].no_wrap, table.columns[3].overflow = True, "crop"
    for name, seconds in estimate.step.to_dict().items():
        start_s, end_s = end_s, end_s + seconds
        if seconds >= _LEAST_SHARE * total_s:
            drawn = bar(start_s, end_s, total_s, _WIDTH)
            table.add_row(COMPONENT_NAMES[name], format_duration(seconds), percent(seconds / total_s), drawn)
    table.add_row("[bold]step", f"[bold]{format_duration(total_s)}", "[bold]100 %", "")
    return table


def bar(start_s: float, end_s: float, total_s: float, width: int) -> str:
    """Return a bar from `start_s` to `end_s` of `width` columns that are the whole step.

    Its length, in eighths of a column, is that of its seconds alone, wherever it starts: a longer time is never drawn
    shorter.
    """
    eighths = min(max(round(8 * width * (end_s - start_s) / total_s), 1), 8 * width)
    drawn = "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
    start = min(int(start_s / total_s * width), width - len(drawn))
    return f"[dim]{' ' * start}[/]{drawn}"


def mfu_words(precision: Precision) -> str:
    """Return what the MFU of a step in `precision` means, and of which peak it is a share."""
    dtype = MATMUL_DTYPE[precision]
    return f"{MFU_MEANS}. {PEAK_OF_FLOAT8}" if dtype == "float8" else f"{MFU_MEANS} of {dtype}"
