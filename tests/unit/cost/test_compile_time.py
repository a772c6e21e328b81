"""What compiling takes is said of blocks where blocks are compiled, and of nothing else."""

import pytest

from meshwright.cost.compile_time import num_compiled, shared_graphs
from meshwright.spec.layout.layout_text import parse_layout
from meshwright.spec.model.presets import PRESETS


@pytest.mark.parametrize(
    ("layout", "num_blocks", "is_shared"),
    [
        ("compile=true", 1, True),
        ("compile=model", PRESETS["llama3-8b"].num_layers, False),
        ("compile_loss=true,compile_optimizer=true,loss_chunks=4", 0, False),
    ],
)
def test_blocks_that_are_compiled(layout: str, num_blocks: int, is_shared: bool) -> None:
    assert num_compiled(PRESETS["llama3-8b"], parse_layout(layout)) == num_blocks
    assert bool(shared_graphs(parse_layout(layout))) == is_shared
