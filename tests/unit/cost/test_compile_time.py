"""What compiling takes is said of blocks where blocks are compiled, and of nothing else."""

from __future__ import annotations

import pytest

from meshwright.cost.compile_time import compile_s, compile_s_of, shared_graphs
from meshwright.spec.layout.layout_text import parse_layout
from meshwright.spec.model.presets import PRESETS

LLAMA = PRESETS["llama3-8b"]


@pytest.mark.parametrize(
    ("layout", "expected_s", "is_shared"),
    [
        ("compile=true", compile_s(1, 1, 2), True),
        ("compile=model", compile_s(1, 1, 2, LLAMA.num_layers), False),
        ("compile_loss=true,compile_optimizer=true,loss_chunks=4", None, False),
    ],
)
def test_blocks_that_are_compiled(layout: str, expected_s: float | None, is_shared: bool) -> None:
    assert compile_s_of(LLAMA, parse_layout(layout), num_cores=2) == expected_s
    assert bool(shared_graphs(parse_layout(layout))) == is_shared


MEASURED = {2: 15.3, 4: 17.7, 8: 21.5, 16: 28.6, 32: 44.3}
"""CPU seconds of one graph by its layers, a core of an AMD EPYC, torch 2.13.0, 2026-11-27; 8 was not fitted."""
OF_BLOCKS_S = 9.5
"""Of the blocks of the same model there."""


@pytest.mark.parametrize(("num_layers", "measured_s"), MEASURED.items())
def test_one_graph_takes_longer_by_its_layers_as_measured(num_layers: int, measured_s: float) -> None:
    # The processor's speed is not predicted, so that both are compared with blocks.
    predicted = compile_s(1, 1, 1, num_layers) / compile_s(1, 1, 1)
    assert predicted == pytest.approx(measured_s / OF_BLOCKS_S, rel=0.08)


def test_ranks_beyond_the_cores_wait() -> None:
    assert compile_s(1, 4, 2, 8) == 2 * compile_s(1, 2, 2, 8) == 2 * compile_s(1, 1, 2, 8)
