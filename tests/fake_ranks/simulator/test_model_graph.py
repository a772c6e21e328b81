"""A model's graph exposes less communication after its pass than before, and no more than FSDP2."""

from __future__ import annotations

import pytest

from benchmarks.graph_collectives import WAYS, num_collectives, simulated
from meshwright.spec.step.timeline_decomposition import decompose

_BLOCKS = ("model.options.num_layers=2", "train.seq_len=4096")


@pytest.mark.long
def test_the_pass_hides_communication() -> None:
    steps = {way: simulated(way, 8, _BLOCKS) for way in WAYS}
    exposed_s = {way: decompose(timeline).dp_communication_s for way, (timeline, _) in steps.items()}
    collectives = {way: num_collectives(traces) for way, (_, traces) in steps.items()}
    assert exposed_s["model"] < exposed_s["blocks, FSDP2"] < exposed_s["model, before the pass"]
    assert collectives["model"] < collectives["model, before the pass"] / 4
    assert steps["model"][0].step_s < steps["model, before the pass"][0].step_s
    # Both run the same operators; a graph's embedding is added up in float32.
    took_s = {way: timeline.step_s for way, (timeline, _) in steps.items()}
    assert took_s["model"] < 1.02 * took_s["blocks, FSDP2"]
    assert decompose(steps["model"][0]).recomputation_s == 0
