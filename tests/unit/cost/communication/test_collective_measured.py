"""The collective model meets what others measured, cell by cell."""

import csv
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from meshwright.cost.communication.all_to_all import all_to_all_s
from meshwright.cost.communication.collective import all_gather_s, all_reduce_s, group_of, reduce_scatter_s
from meshwright.cost.communication.fabric import FabricConstants, fabric_of
from meshwright.hardware.catalogue import load_cluster

FABRIC = fabric_of(load_cluster("h100-ib400"), FabricConstants())
LINK_BYTES_PER_S, NIC_BYTES_PER_S, DEVICES_PER_NODE = 450e9, 50e9, 8
STATED_NODES, STATED_BYTES = (2, 8, 32, 128), (2**24, 2**27, 2**30)
"""The cells that the model is held to one by one."""


class Cell(NamedTuple):
    kind: str
    num_nodes: int
    num_bytes: int
    fraction: float

    @property
    def error(self) -> float:
        """Return predicted over measured bandwidth, less 1."""
        return predicted_fraction(self) / self.fraction - 1


def measured_cells() -> list[Cell]:
    lines = (Path(__file__).parent / "measured_bandwidth.csv").read_text(encoding="utf-8").splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    return [Cell(r["kind"], int(r["num_nodes"]), int(r["num_bytes"]), float(r["fraction"])) for r in rows]


def predicted_fraction(cell: Cell) -> float:
    num_ranks = cell.num_nodes * (1 if cell.kind == "rails" else DEVICES_PER_NODE)
    group = group_of(DEVICES_PER_NODE if cell.kind == "rails" else 1, num_ranks, FABRIC)
    if cell.kind == "all-to-all":
        seconds = all_to_all_s(cell.num_bytes, group, FABRIC)
        other_ranks = num_ranks - (DEVICES_PER_NODE if cell.num_nodes > 1 else 1)
        bound = NIC_BYTES_PER_S if cell.num_nodes > 1 else LINK_BYTES_PER_S
    else:
        seconds = all_gather_s(cell.num_bytes, group, FABRIC)
        other_ranks = num_ranks - 1
        bound = LINK_BYTES_PER_S if cell.num_nodes == 1 else NIC_BYTES_PER_S * num_ranks / cell.num_nodes
    return float(cell.num_bytes * other_ranks / num_ranks / seconds / bound)


CELLS = measured_cells()


def is_stated(cell: Cell) -> bool:
    return cell.kind == "ring" and cell.num_nodes in STATED_NODES and cell.num_bytes in STATED_BYTES


@pytest.mark.parametrize("cell", [cell for cell in CELLS if is_stated(cell)], ids=str)
def test_a_ring_across_nodes_is_within_25_percent_of_measured(cell: Cell) -> None:
    assert abs(cell.error) <= 0.25


@pytest.mark.parametrize(
    ("kind", "median", "worst"), [("ring", 0.11, 0.30), ("rails", 0.06, 0.11), ("all-to-all", 0.07, 0.15)]
)
def test_every_kind_is_near_what_was_measured(kind: str, median: float, worst: float) -> None:
    errors = np.abs([cell.error for cell in CELLS if cell.kind == kind])
    assert np.median(errors) <= median
    assert errors.max() <= worst


def test_sizes_are_the_whole_tensor_not_a_rank_s_part() -> None:
    cell = next(cell for cell in CELLS if cell == Cell("ring", 128, 2**24, 0.0087))
    as_part = cell._replace(num_bytes=cell.num_bytes * cell.num_nodes * DEVICES_PER_NODE)
    assert predicted_fraction(as_part) > 50 * cell.fraction


def test_reductions_in_the_switch_beat_a_ring_as_on_h100() -> None:
    group = group_of(1, 8, FABRIC)
    bus_bytes_per_s = 2 * 7 / 8 * 2**30 / all_reduce_s(2**30, group, FABRIC)
    assert bus_bytes_per_s == pytest.approx(475e9, rel=0.03)
    assert all_reduce_s(2**30, group, FABRIC) < 2 * reduce_scatter_s(2**30, group, FABRIC)
