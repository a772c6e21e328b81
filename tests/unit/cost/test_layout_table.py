"""What a table of layouts says of each is what the layout itself says."""

from __future__ import annotations

from itertools import product

from meshwright.cost.layout_table import layout_table
from meshwright.spec.layout.layout import Layout


def test_blocks_are_compiled_where_the_layout_says_so() -> None:
    choices = product((1, 2), (1, 2), ("all-gather", "ring"), ("none", "selective", "full"), (False, True))
    layouts = [
        Layout(dp_shard=2, ep=ep, cp=cp, cp_method=method, activation_checkpoint=checkpoint, compile=is_compiled)
        for ep, cp, method, checkpoint, is_compiled in choices
    ]
    assert layout_table(layouts).compiles_blocks.tolist() == [one.compiles_blocks for one in layouts]
    refused = [one for one in layouts if one.compile and not one.compiles_blocks]
    assert {(one.ep, one.cp_method if one.cp > 1 else "", one.activation_checkpoint) for one in refused} == {
        (1, "ring", "selective"),
        (2, "", "selective"),
        (2, "all-gather", "selective"),
        (2, "ring", "selective"),
    }
