"""The suite's table, and its bars."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.table import Table

from benchmarks.gpu_suite.cases import EIGHT_B, ONE_B, OURS, Case
from benchmarks.gpu_suite.suite_run import Measured

LOSS_TOLERANCES = {"bfloat16": 0.01, "float8": 0.03}
"""Relative, of each step's loss from that of the first row of its shape in bfloat16: programs round in other places."""
PEER_BAR, MFU_BAR, PLAN_BAR, FLOAT8_BAR = 1.1, 0.5, 0.05, 1.25

Rows = Mapping[str, Measured]


def table_of(cases: Sequence[Case], rows: Rows, title: str) -> Table:
    """Return a row for each case."""
    columns = ("what", "step, ms", "spread", "tokens/s", "MFU", "peak, GB", "plan: step, peak", "loss", "off by")
    table = Table(*columns, title=title, box=None)
    for case in cases:
        row = rows.get(case.name)
        if row is None or row.failure:
            table.add_row(case.name, "not run yet" if row is None else f"failed: {row.failure}"[:60])
            continue
        figures = [f"{row.step_s * 1e3:.1f}", f"{row.spread:.0%}", f"{case.shape.tokens_per_step / row.step_s:,.0f}"]
        figures += ["" if (mfu := mfu_of(row)) is None else f"{mfu:.1%}", f"{row.peak_bytes / 1e9:.2f}", _plan(row)]
        off = loss_difference(case, cases, rows)
        word = "" if off is None else f"{off:.1e}" + ("" if is_equal(case, off) else ", not comparable")
        table.add_row(case.name, *figures, f"{row.losses[-1]:.4f}", word)
    return table


def _plan(row: Measured) -> str:
    if row.predicted_s is None or row.predicted_bytes is None:
        return ""
    return f"{row.predicted_s * 1e3:.0f} ms, {row.predicted_bytes / 1e9:.2f} GB"


def mfu_of(row: Measured) -> float | None:
    """Return model FLOPs over those at the peak of bfloat16, in float8 too; None where the peak is unknown."""
    return None if row.peak_step_s is None else row.peak_step_s / row.step_s


def loss_difference(case: Case, cases: Sequence[Case], rows: Rows) -> float | None:
    """Return the largest relative difference of a step's loss from that of the shape's first row in bfloat16."""
    first = next((one for one in cases if one.shape == case.shape and _good(one, rows)), None)
    if first is None or first.precision != "bfloat16":
        return None
    pairs = zip(rows[case.name].losses, rows[first.name].losses, strict=True)
    differences = [abs(one - other) / abs(other) for one, other in pairs]
    return float("nan") if any(one != one for one in differences) else max(differences)


def is_equal(case: Case, difference: float) -> bool:
    """Return whether a row did the same work as the first of its shape."""
    return difference <= LOSS_TOLERANCES[case.precision]


def bars(cases: Sequence[Case], rows: Rows) -> Iterator[str]:
    """Yield one line for each bar: met, missed, or what is not measured yet."""
    by_key = {(case.shape.name, case.precision, case.who): rows[case.name] for case in cases if _good(case, rows)}
    for shape in dict.fromkeys(case.shape for case in cases):
        for precision in LOSS_TOLERANCES:
            peers = [
                rows[case.name].step_s
                for case in cases
                if (case.shape, case.precision) == (shape, precision) and case.who != OURS and _equal(case, cases, rows)
            ]
            ours = by_key.get((shape.name, precision, OURS))
            ratio = min(peers) / ours.step_s if peers and ours is not None else None
            yield _line(f"{shape.name}, {precision}: tokens/s of the best peer's", ratio, PEER_BAR)
        wide, narrow = (by_key.get((shape.name, precision, OURS)) for precision in LOSS_TOLERANCES)
        gain = wide.step_s / narrow.step_s if wide is not None and narrow is not None else None
        yield _line(f"{shape.name}: float8's step as fast as bfloat16's", gain, FLOAT8_BAR)
    first = by_key.get((ONE_B.name, "bfloat16", OURS))
    yield _line(f"{ONE_B.name}: MFU", None if first is None else mfu_of(first), MFU_BAR)
    eight = by_key.get((EIGHT_B.name, "bfloat16", OURS))
    known = eight is not None and eight.predicted_s is not None
    off = abs(eight.predicted_s / eight.step_s - 1) if known and eight and eight.predicted_s else None
    yield _line(f"{EIGHT_B.name}: step off the plan's by", off, PLAN_BAR, is_most=True)


def _line(what: str, value: float | None, bar: float, *, is_most: bool = False) -> str:
    side = "at most" if is_most else "at least"
    if value is None:
        return f"{what}: not measured (bar: {side} {bar})"
    is_met = value <= bar if is_most else value >= bar
    return f"{what}: {value:.3f}, bar {side} {bar}: {'met' if is_met else 'missed'}"


def _good(case: Case, rows: Rows) -> bool:
    return case.name in rows and not rows[case.name].failure


def _equal(case: Case, cases: Sequence[Case], rows: Rows) -> bool:
    off = loss_difference(case, cases, rows) if _good(case, rows) else None
    return off is not None and is_equal(case, off)
