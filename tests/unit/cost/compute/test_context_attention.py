"""What attention of a split sequence computes besides its causal whole, against the operators counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from cost_cases import cases, changed, setting
from meshwright.cost.case import Setting
from meshwright.cost.compute.context_attention import ContextAttention, context_attention_of
from meshwright.cost.constants import fitted_constants
from meshwright.cost.step_times import step_times
from meshwright.cost.work import BLOCK, work_of
from meshwright.spec.layout.layout import ContextMethod, Layout

SEQ_LEN, CP = 16_384, 4
RING = Layout(dp_shard=2, cp=CP, cp_method="ring")
GATHER = Layout(dp_shard=2, cp=CP, cp_method="all-gather")
POSITIONS = SEQ_LEN // CP
QUERIES, KEYS_AND_VALUES, HEADS = POSITIONS * 4096, POSITIONS * 2 * 1024, POSITIONS * 32
"""Elements of Llama 3 8B on one rank; scores' logsumexps are one for each head."""


def ours() -> Setting:
    return changed(setting("llama3-8b", seq_len=SEQ_LEN), plain_context_attention=True)


def of(layout: Layout, given: Setting | None = None) -> tuple[ContextAttention, np.ndarray]:
    """Return the attention of one layout, and which owner its blocks are."""
    table = cases(given or ours(), layout)
    owners = work_of(table).owners
    return context_attention_of(table, owners), np.flatnonzero(owners.kind == BLOCK)


def test_a_ring_moves_what_its_operators_read_and_write() -> None:
    attention, block = of(RING)
    forward, backward = attention.moved_bytes(block)
    wide, narrow = 4, 2
    own_and_result = 2 * (narrow + wide) * QUERIES
    # mul_ reads and writes the sum; addcmul_ reads it and a 16-bit piece, and writes it.
    merge = (2 * wide + 2 * wide + narrow) * QUERIES + (12 + 2 * 12 + 2 * 8 + 2 * 4 + 8) * HEADS
    assert forward == pytest.approx(own_and_result + (CP - 1) * merge)
    sums = wide * (QUERIES + KEYS_AND_VALUES)
    # The own piece has all of its keys, and each other one half of another rank's.
    added = (2 * wide + narrow) * (CP * QUERIES + (1 + (CP - 1) / 2) * KEYS_AND_VALUES)
    cast = (wide + narrow) * (QUERIES + KEYS_AND_VALUES)
    assert backward == pytest.approx(sums + added + cast)


def test_pieces_of_a_ring_have_the_rate_of_a_shorter_context() -> None:
    attention, block = of(RING)
    constants = fitted_constants()
    ramp = constants["attention_ramp_tokens"]

    def share(context: float) -> float:
        return context / (context + ramp)

    expected = share(SEQ_LEN / 2) / share(POSITIONS / 2)
    assert expected > 1.05
    assert attention.slowdown(block, constants) == pytest.approx(expected)


def test_gathered_keys_are_put_in_order() -> None:
    attention, block = of(GATHER)
    forward, backward = attention.moved_bytes(block)
    gathered = KEYS_AND_VALUES * CP * 2
    assert forward == pytest.approx(4 * gathered)
    assert backward > 9 * gathered


@pytest.mark.parametrize("method", ["ring", "all-gather", "ulysses"])
def test_only_plain_operators_cost_more(method: ContextMethod) -> None:
    layout = Layout(dp_shard=2, cp=CP, cp_method=method)
    plain, fused = (step_times(cases(changed(ours(), plain_context_attention=on), layout)) for on in (True, False))
    costs = plain.total_s[0] > 1.01 * fused.total_s[0]
    assert costs == (method != "ulysses")


def test_only_whole_recomputation_merges_and_sends_a_ring_again() -> None:
    none, selective, full = (RING.replace(activation_checkpoint=kind) for kind in ("none", "selective", "full"))
    plain = step_times(cases(changed(ours(), plain_context_attention=False), none, selective, full))
    merged = step_times(cases(ours(), none, selective, full))
    more = merged.recomputation_s - plain.recomputation_s
    assert more[:2].tolist() == [0.0, 0.0]
    assert more[2] > 0
    assert merged.cp_communication_s[1] == pytest.approx(merged.cp_communication_s[0])
    assert merged.cp_communication_s[2] > merged.cp_communication_s[0]
