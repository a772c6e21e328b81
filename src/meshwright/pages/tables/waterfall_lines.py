"""A measured step by cause as a table and sentences: floor to measured, predicted next to measured; and in short."""

from collections.abc import Iterator
from itertools import accumulate

from rich.console import RenderableType

from meshwright.pages.tables.page_table import PageTable, percent, signed
from meshwright.pages.tables.waterfall import bar
from meshwright.spec.step.step_waterfall import LEAST_SHARE, MEASURED, PREDICTED, BestChange, Waterfall, WaterfallRow
from meshwright.units import format_duration

_BAR_WIDTH = 14
_NUM_SHORT = 4
"""Causes that the short form names."""


def waterfall_page(found: Waterfall, how_to_profile: str) -> Iterator[RenderableType]:
    """Yield the table, what it is a table of, what is left unexplained, and the largest potential speedup."""
    yield waterfall_table(found)
    yield ""
    yield " ".join([source_words(found, how_to_profile), *floor_words(found), *other_words(found)])
    yield from change_words(found)


def waterfall_table(found: Waterfall) -> PageTable:
    """Return a row for each cause, with its seconds in each column, and a bar from where the last one ended."""
    columns = found.columns
    compares = PREDICTED in columns and found.source == "profile"
    drawn = MEASURED if found.source == "profile" or PREDICTED not in columns else PREDICTED
    headers = [*(f"{who}#" for who in columns), *(["difference#"] if compares else []), f"as {drawn}"]
    table = PageTable("where the step goes", *headers)
    table.columns[-1].no_wrap, table.columns[-1].overflow = True, "crop"
    rows = found.rows
    ends_s = list(accumulate((row.by_column_s[drawn] or 0.0 for row in rows), initial=0.0))
    for row, start_s, end_s in zip(rows, ends_s, ends_s[1:], strict=False):
        cells = ["-" if value is None else format_duration(value) for value in row.by_column_s.values()]
        # What the drawn column does not distinguish has no length in it.
        drawing = bar(start_s, end_s, columns[drawn].total_s, _BAR_WIDTH) if row.by_column_s[drawn] else ""
        table.add_row(row.words, *cells, *([_difference(row)] if compares else []), drawing)
    totals = [format_duration(one.total_s) for one in columns.values()]
    name = "step" if found.source == "timers" else "step, profiled"
    more = [signed(found.measured.total_s - columns[PREDICTED].total_s)] if compares else []
    table.add_row(*(f"[bold]{cell}" for cell in (name, *totals, *more, "")))
    if found.source == "profile":
        blanks = ["" for _ in totals[1:]]
        table.add_row("profiler, and noise", *blanks, signed(-found.profiling_s), *([""] if compares else []), "")
        table.add_row("step, median", *blanks, format_duration(found.measured_s), *([""] if compares else []), "")
    return table


def source_words(found: Waterfall, how_to_profile: str) -> str:
    """Return what was measured, on which rank, and that its causes sum to the step."""
    if found.source == "timers":
        causes = "The causes are predicted, not measured. " if PREDICTED in found.columns else ""
        return (
            f"{causes}Measured by the training loop's timers, the median of {found.timed}: no step was profiled, so "
            f"that only the wait for data is distinguished; {how_to_profile}."
        )
    stage = "" if found.pipeline_rank is None else f", pipeline rank {found.pipeline_rank}"
    others = "" if found.num_ranks == 1 else f" of rank {found.rank}{stage}, the critical one (it works most)"
    of_several = "" if found.num_steps == 1 else f", the median of {found.num_steps} profiled"
    small = LEAST_SHARE * found.measured.total_s
    return (
        f"Measured: step {found.step}{of_several},{others} with torch.profiler. The causes sum to it exactly (those "
        f"below {format_duration(small)} are not listed). Medians are of {found.timed}, without the profiler."
    )


def floor_words(found: Waterfall) -> Iterator[str]:
    """Yield how far the step is from its floor, and what is wrong with that or with the prediction."""
    columns = found.columns
    floor_s = max(one.model_flops_at_peak_s for one in columns.values())
    if floor_s:
        whose = "" if found.rates_of is None else " of the example machine"
        yield f"The step takes {found.measured_s / floor_s:.1f} times the model FLOPs at peak{whose}."
    if found.is_floor_lowered:
        yield "Kernels were faster than the peak of this machine's catalogue entry: run `meshwright calibrate`."
    if found.rates_of is not None:
        yield (
            f"This machine is not calibrated: predictions are of an example, {found.rates_of}, and say little about "
            "this machine; `meshwright calibrate` measures it."
        )
    for note in found.notes:
        yield f"Note: {note}."
    if found.unpriced:
        yield f"No prediction: {found.unpriced}."


def other_words(found: Waterfall) -> Iterator[str]:
    """Yield what other communication is, where a row of the table has some."""
    if any(row.name == "other_communication_s" for row in found.rows):
        alone = ", which one rank calls too" if found.num_ranks == 1 else ""
        yield (
            "Other communication: copies between the memories of host and device (batches, the loss), and sums of the "
            f"loss and of the gradient norm over all ranks{alone}."
        )


def change_words(found: Waterfall) -> Iterator[str]:
    """Yield the largest potential speedup of one job key, in one sentence; one more for a change of numerics.

    A change that saves less than the error of the prediction is not named, and none for a machine without own rates.
    """
    if found.predicted is None:
        return
    if found.rates_of is not None:
        yield (
            "No change of a key is advised: what it would save on this machine is unknown until `meshwright calibrate` "
            "has measured it."
        )
        return
    kept = next((one for one in found.changes if not one.changes_numerics), None)
    if kept is None:
        yield "No change of one layout key that is valid and fits is predicted to be faster."
    elif found.is_advised(kept):
        yield f"Largest potential speedup of one key: {_saving(kept)}, more than the error of the prediction."
    elif kept.saved_s >= found.measured_s:
        yield (
            f"No change of one key is advised: {kept.change} is predicted to save {format_duration(kept.saved_s)}, and "
            f"the whole step takes {format_duration(found.measured_s)}."
        )
    else:
        error_s = found.compared(kept).error_s
        yield (
            "No change of one key is predicted to save more than the error of the prediction "
            f"(±{format_duration(error_s)})."
        )
    for one in found.changes:
        if one.changes_numerics and found.is_advised(one):
            yield f"With other numerics: {_saving(one)}."


def short_lines(found: Waterfall, how_to_profile: str) -> Iterator[str]:
    """Yield the waterfall in two or three lines, for the end of a log."""
    is_profiled = found.source == "profile"
    who = MEASURED if is_profiled or found.predicted is None else PREDICTED
    step = found.columns[who]
    above = [row for row in found.rows if row.name != "model_flops_at_peak_s"]
    rows = sorted(above, key=lambda row: -(row.by_column_s[who] or 0.0))[:_NUM_SHORT]
    floor_s = step.model_flops_at_peak_s
    parts = [f"model FLOPs at peak {format_duration(floor_s)}"] if floor_s else []
    parts += [f"{row.words} {format_duration(row.by_column_s[who] or 0.0)}" for row in rows if row.by_column_s[who]]
    if found.predicted is None and not is_profiled:
        yield f"step {format_duration(found.measured_s)} (median of {found.timed}); by cause: {how_to_profile}"
        return
    predicted = "" if found.predicted is None else f", {format_duration(found.predicted.total_s)} predicted"
    origin = f"profiled, rank {found.rank}" if is_profiled else "predicted: no step was profiled"
    yield f"where the step goes ({origin}): {', '.join(parts)}"
    yield f"step {format_duration(found.measured_s)} measured (median of {found.timed}){predicted}"
    kept = next((one for one in found.changes if found.is_advised(one) and not one.changes_numerics), None)
    if kept is not None and found.rates_of is None:
        yield f"largest potential speedup of one key: {_saving(kept)}"


def _saving(one: BestChange) -> str:
    share = one.saved_s / (one.step_s + one.saved_s)
    return f"{one.change}, predicted to save {format_duration(one.saved_s)} of the predicted step ({percent(share, 0)})"


def _difference(row: WaterfallRow) -> str:
    predicted_s, measured_s = row.by_column_s[PREDICTED], row.by_column_s[MEASURED]
    return "" if predicted_s is None and measured_s is None else signed((measured_s or 0.0) - (predicted_s or 0.0))
