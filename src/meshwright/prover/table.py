"""The table of a proof: a line for each layout, its worst differences beside what rounding explains."""

from __future__ import annotations

from rich.table import Table

from meshwright.spec.layout_text import layout_text
from meshwright.spec.proof import Difference, LayoutProof, Proof
from meshwright.units import format_duration

_NO_LIMIT = 10_000


def proof_table(proof: Proof) -> Table:
    """Return the outcome of each layout, with the differences and, in %, how much of its bar each one takes."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for header in ("layout", "ranks", "loss", "gradient", "weight", "worst in", "s", "verdict"):
        is_number = header in ("ranks", "loss", "gradient", "weight", "s")
        table.add_column(header, justify="right" if is_number else "left", overflow="fold")
    for one in proof.layouts:
        table.add_row(*row_of(one), style=None if one.holds else "bold red")
    return table


def row_of(one: LayoutProof) -> list[str]:
    """Return one line of the table."""
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
    """Return a relative difference and the share of its bar: "3.1e-07 3%"; "=" where there is none at all."""
    if difference.relative == 0:
        return "="
    share = difference.relative / difference.bar
    percent = f"{share:.0%}" if share < 10 else f"{share:.0e}x"
    return f"{difference.relative:.1e} {percent}"


def worst_text(one: LayoutProof) -> str:
    """Return where the layout differs most from one process, "" where it does not."""
    worst = one.worst
    return f"{worst.name}, step {worst.step}" if worst is not None and worst.relative else ""


def verdict(one: LayoutProof) -> str:
    """Return whether the layout trains what one process trains, and what is wrong if it does not."""
    if one.problem is not None:
        return f"FAILS: {one.problem}"
    if one.repeats is False:
        return "DIFFERS from itself when it runs again"
    if one.holds:
        return "equal" if not any(difference.relative for difference in one.differences) else "holds"
    what = dict(zip(("loss", "gradient", "weight"), one.differences, strict=True))
    return f"DIFFERS in {', '.join(name for name, difference in what.items() if not difference.is_within)}"


def summary(proof: Proof) -> str:
    """Return what was compared and how it came out, in a line or two."""
    num_layouts, wrong = len(proof.layouts), [one for one in proof.layouts if not one.holds]
    what = "float64" if proof.exact else "float32"
    outcome = "all hold" if not wrong else f"{len(wrong)} do not hold"
    return (
        f"{num_layouts} layouts against one process, {proof.num_steps} steps in {what}: {outcome} "
        f"({format_duration(proof.took_s)})"
    )
