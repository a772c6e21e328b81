"""A simulation's memory as tables: each rank's peak, what the fullest holds then, recompute and offload candidates.

Each table has one column of words, the last: next to the figures 80 columns leave too little for the names of two.
"""

from collections.abc import Sequence
from typing import TypeVar

from rich.markup import escape
from rich.table import Table

from meshwright.pages.tables.page_table import PageTable, labels_of
from meshwright.spec.step.simulation_report import Outcome, RankMemory, SavedTensors, SimulationReport
from meshwright.units import format_bytes, format_duration

Row = TypeVar("Row")
RankRow = tuple[int, int, tuple[str, ...]]
"""A rank, the number of ranks in its class, and its cells."""

_MOST_RANKS = 16
_CLASSES = {
    "parameter": "parameters",
    "gradient": "gradients",
    "unsharded_parameter": "unsharded parameters",
    "activation": "activations",
}
_CANDIDATES = "recompute and offload candidates at the peak"


def role_words(role: str) -> str:
    """Return the name of a tensor role, lower case as in JSON, that plans use for the same memory class."""
    return _CLASSES.get(role, role.replace("_", " "))


def rank_memory_table(run: SimulationReport, outcome: Outcome) -> Table:
    """Return the fullest moment of each rank."""
    table = PageTable("memory", "ranks#", "allocated#", "reserved#", "free#", "peak")
    rows = []
    for rank in outcome.memory:
        left = run.usable_memory_bytes - rank.reserved_bytes
        free = format_bytes(left) if left >= 0 else f"[red]-{format_bytes(-left)}"
        most = sorted(rank.by_role, key=lambda role: -rank.by_role[role])[:2]
        held = ", ".join(f"{role_words(role)} {format_bytes(rank.by_role[role])}" for role in most)
        where = f"{rank.phase} {escape(rank.scope)}".strip()
        stage = f", pp {rank.pipeline_rank}" if run.layout is not None and run.layout.pp > 1 else ""
        sizes = (format_bytes(rank.allocated_bytes), format_bytes(rank.reserved_bytes), free)
        rows.append((rank.rank, rank.num_ranks, (stage, *sizes, f"{where}: {held}" if where else held)))
    for first, num_ranks, (stage, *cells) in shown_ranks(merge_identical(rows)):
        table.add_row(f"rank {first}{stage}", f"{num_ranks:,}", *cells)
    if outcome.predicted is not None:
        predicted = outcome.predicted.memory
        table.caption = (
            f"predicted of the fullest rank: {format_bytes(predicted.allocated_bytes)} allocated, "
            f"{format_bytes(predicted.reserved_bytes)} reserved"
        )
    return table


def merge_identical(rows: Sequence[RankRow]) -> list[RankRow]:
    """Merge rows with identical cells: the first rank, with the number of ranks of all."""
    found: dict[tuple[str, ...], tuple[int, int]] = {}
    for rank, num_ranks, cells in rows:
        first, others = found.get(cells, (rank, 0))
        found[cells] = (first, others + num_ranks)
    return [(first, num_ranks, cells) for cells, (first, num_ranks) in found.items()]


def largest_table(outcome: Outcome) -> Table:
    """Return what the fullest rank holds at its peak."""
    fullest = outcome.fullest
    table = PageTable(
        "" if fullest is None else f"rank {fullest.rank} at its peak", "bytes#", "tensors#", "allocated by"
    )
    for live in () if fullest is None else fullest.largest:
        cells = (format_bytes(live.num_bytes), f"{live.num_tensors:,}", _allocated_by(live.op, live.scope, live.line))
        table.add_row(role_words(live.role), *cells)
    return table


def most_held(rank: RankMemory) -> str:
    """Return the largest group of a rank's live tensors: class, bytes, and the operation that allocated them."""
    if not rank.largest:
        return ""
    most = rank.largest[0]
    number = f"{most.num_tensors:,} tensors" if most.num_tensors > 1 else "one tensor"
    made = _allocated_by(most.op, most.scope, most.line)
    return f"largest: {role_words(most.role)}, {format_bytes(most.num_bytes)} in {number} ({made})"


def savings_table(outcome: Outcome) -> Table:
    """Return the tensors of the fullest rank that cost least to recompute or offload."""
    table = PageTable(*labels_of("num_bytes", "num_tensors", "recompute_s", "offload_s"), "allocated by")
    table.title = _CANDIDATES
    for saved in outcome.savings:
        *figures, op, scope = saving_cells(saved)
        table.add_row(*figures, _allocated_by(op, scope))
    return table


def saving_cells(saved: SavedTensors) -> tuple[str, ...]:
    """Return bytes, number, seconds of recomputation and of offloading, the operator and its place."""
    costs = ("-" if seconds is None else format_duration(seconds) for seconds in (saved.recompute_s, saved.offload_s))
    return format_bytes(saved.num_bytes), f"{saved.num_tensors:,}", *costs, saved.op, saved.scope


def _allocated_by(op: str, scope: str, line: str = "") -> str:
    """Return an operation, its module, and the line of the program."""
    where = f"{short_op(op)} in {escape(scope)}" if scope else short_op(op)
    return f"{where}, {escape(line)}" if line else where


def short_op(op: str) -> str:
    """Return an operator's name without the library and the overload: c10d._allgather_base_.default is long.

    cuDNN's attention is called by the function of torch that chooses it.
    """
    name = op.split(".")[1] if op.count(".") > 1 else op.rpartition(".")[2]
    name = name.strip("_")
    # Traced as on compute capability 9.0; other devices take another kernel, whose tensors are equal.
    return name.replace("scaled_dot_product_cudnn_attention", "scaled_dot_product_attention")


def shown_ranks(rows: Sequence[Row]) -> list[Row]:
    """Return the rows; of many the first and the last."""
    if len(rows) <= _MOST_RANKS:
        return list(rows)
    return [*rows[: _MOST_RANKS // 2], *rows[-_MOST_RANKS // 2 :]]
