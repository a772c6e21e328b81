"""A step on a host's own cores by component: the formulas compared with the simulation, on one calibration."""

from __future__ import annotations

from pathlib import Path

import pytest

from both_predictions import BothPredictions, predict_both
from meshwright.hardware.catalogue import load_cluster
from meshwright.spec.machine.cluster import Cluster
from meshwright.spec.machine.device import CollectivePoint, Figure, Source

EXAMPLES = Path(__file__).parents[3] / "examples"
SOURCE = Source(title="a test", date="2026-11-27", kind="measured")
REPLICAS = "layout.dp_shard=1 layout.dp_replicate=2 layout.microbatch_size=4"
"""What `make demo` trains."""


def calibrated_host() -> Cluster:
    """Return the catalogue's example of a calibrated host, with a line for sums next to computation."""
    cluster = load_cluster("cpu-local").with_num_devices(2)
    assert cluster.intra_node is not None
    latency_s, bytes_per_s = Figure(value=2e-4, source=SOURCE), Figure(value=1.8e9, source=SOURCE)
    point = CollectivePoint(kind="async-all-reduce", num_ranks=2, latency_s=latency_s, bytes_per_s=bytes_per_s)
    collectives = (*cluster.intra_node.collectives, point)
    return cluster.replace(intra_node=cluster.intra_node.replace(collectives=collectives))


def both(folder: Path, overrides: str, job: str = "tiny") -> BothPredictions:
    text = (EXAMPLES / f"{job}.toml").read_text(encoding="utf-8")
    return predict_both(folder, text, overrides, "cpu-local", calibrated_host())


def test_the_demos_step_agrees(tmp_path: Path) -> None:
    found = both(tmp_path, REPLICAS)
    found.require_equal_steps(0.05)
    sums_s, off = found.estimate.step.dp_communication_s, found.component_errors()["dp_communication_s"]
    # Of 22 large gradients, the start of each.
    assert sums_s > 22 * 2e-4
    assert abs(off) < 0.001


@pytest.mark.parametrize("overrides", ["layout.dp_shard=2", "layout.dp_shard=1"])
def test_a_step_that_shares_or_holds_the_model_agrees(tmp_path: Path, overrides: str) -> None:
    both(tmp_path, overrides).require_equal_steps(0.05)


@pytest.mark.long
@pytest.mark.parametrize(
    ("job", "overrides"),
    [
        ("tiny", "layout.dp_shard=1 layout.tp=2"),
        ("tiny", "layout.dp_shard=1 layout.tp=2 layout.compile=true"),
        ("tiny", "layout.dp_shard=1 layout.pp=2"),
        ("tiny", "layout.dp_shard=1 layout.cp=2 layout.cp_method=ring"),
        ("tiny", f"{REPLICAS} layout.compile=true"),
        ("tiny-moe", "layout.dp_shard=2"),
    ],
)
def test_every_component_of_other_steps_agrees(tmp_path: Path, job: str, overrides: str) -> None:
    both(tmp_path, overrides, job).require_equal_components(0.10)
