"""Table of a proof: one row per layout with its largest differences and their tolerances."""

from meshwright.pages.tables.page_table import PageTable
from meshwright.spec.layout.layout_text import layout_text
from meshwright.spec.run.proof import FAULTS, Difference, LayoutProof, Proof
from meshwright.units import counted, format_count, format_duration

HEADERS = ("layout", "ranks", "loss", "gradient", "weight", "largest difference in", "s", "verdict")
_FIGURES = ("ranks", "loss", "gradient", "weight", "s")


def proof_table(proof: Proof) -> PageTable:
    """Return the verdict of each layout, with its largest differences as shares of their bars."""
    table = PageTable(*(f"{header}#" if header in _FIGURES else header for header in HEADERS))
    for one in proof.layouts:
        table.add_row(*row_of(one), style=None if one.holds else "bold red")
    return table


def row_of(one: LayoutProof) -> list[str]:
    """Return one row of the table."""
    figures = [difference_text(difference) for difference in one.differences] or ["-", "-", "-"]
    return [
        layout_text(one.layout),
        str(one.layout.num_ranks),
        *figures,
        worst_text(one),
        f"{one.took_s:.1f}",
        verdict(one),
    ]


def difference_text(difference: Difference) -> str:
    """Return a relative difference and its share of the bar: "3.1e-07 (3%)"; "equal" for 0."""
    if difference.relative == 0:
        return "equal"
    return f"{difference.relative:.1e} ({share_text(difference)})"


def share_text(difference: Difference) -> str:
    """Return a difference's share of its bar: "3%", or "6e+04 x" far above it."""
    return f"{difference.share:.0%}" if difference.share < 10 else f"{difference.share:.0e} x"


def worst_text(one: LayoutProof) -> str:
    """Return the quantity with the largest share of its bar; "" if nothing differs."""
    worst = one.worst
    if worst is None or not worst.relative:
        return ""
    return f"{worst.kind}{f' of {worst.name}' if worst.name else ''}, step {worst.step}"


def verdict(one: LayoutProof) -> str:
    """Return the verdict of a layout in one word."""
    if one.holds:
        return "holds"
    return "WRONG" if one.differences else "FAILS"


def reasons(one: LayoutProof) -> str:
    """Return why a layout failed; "" if it holds."""
    wrong = [difference.kind for difference in one.differences if difference.share > 1]
    texts = [f"{' and '.join(wrong)} not that of one process"] if wrong else []
    texts += [one.problem] if one.problem else []
    texts += ["another run gives other bits"] if one.repeats is False else []
    return "; ".join(texts)


def notes(proof: Proof) -> list[str]:
    """Return notes on the table and its outcome, one sentence per line."""
    wrong = sum(not one.holds for one in proof.layouts)
    bars = next((one.differences for one in proof.layouts if one.differences), ())
    lines = [f"{layout_text(one.layout)}: {reasons(one)}" for one in proof.layouts if not one.holds]
    if bars:
        allowed = ", ".join(f"{difference.kind} {difference.bar:.0e}" for difference in bars)
        lines.append(f"Relative to one process; in brackets the share of what rounding explains: {allowed}.")
    if proof.planted is not None:
        found = "found" if wrong else "NOT found"
        lines.append(f"A fault was planted in {proof.planted}, and {found}: {FAULTS[proof.planted]}.")
    again = ", each twice with equal bits" if all(one.repeats for one in proof.layouts) else ""
    outcome = "all hold" if not wrong else f"{wrong} of {len(proof.layouts)} do not hold"
    lines.append(
        f"{counted(len(proof.layouts), 'layout')}, {counted(proof.num_steps, 'step')} in "
        f"{'bfloat16 over float32' if proof.precision == 'mixed' else proof.precision}{again}: "
        f"{outcome}; {format_duration(proof.took_s)}."
    )
    return lines


def changes_text(proof: Proof) -> str:
    """Return the changes of the small job, in one paragraph."""
    changes = ", ".join(f"{change.key} {change.original} -> {change.proven}" for change in proof.changes)
    return f"{format_count(proof.num_parameters)} parameters: {changes}"
