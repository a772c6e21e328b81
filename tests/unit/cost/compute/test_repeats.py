"""Of a backward in two parts, compiled code is computed whole in each, and what stays eager once."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.cost.compute.recompute import compiled_share, repeated_share
from meshwright.cost.layout_table import layout_table
from meshwright.cost.step import StepTerms
from meshwright.cost.step_times import step_times
from meshwright.cost.training_setup import Configurations
from meshwright.spec.layout.layout import Layout
from questions import ask

SPLIT = Layout(pp=2, dp_shard=8, schedule="ZBVZeroBubble", compile=True)


def configs(model: str, *layouts: Layout) -> Configurations:
    return ask(model, 16, batch=32).configs(layout_table(list(layouts)))


def steps(model: str, *layouts: Layout) -> StepTerms:
    return step_times(configs(model, *layouts))


def test_experts_on_ranks_of_their_own_are_computed_once() -> None:
    terms = steps("qwen3-30b-a3b", SPLIT, SPLIT.replace(ep=8), SPLIT.replace(compile=False))
    in_one_graph, in_parts, eager = terms.repeated_backward_s
    assert eager == 0.0 < in_parts < 0.6 * in_one_graph


def test_exchanges_of_tokens_are_not_repeated() -> None:
    compiled, eager = steps(
        "qwen3-30b-a3b", *(SPLIT.replace(ep=8, compile=it) for it in (True, False))
    ).ep_communication_s
    assert compiled == pytest.approx(eager, rel=0.01)


def test_attention_of_a_ring_is_computed_once() -> None:
    gathered, ring = (SPLIT.replace(dp_shard=4, cp=2, cp_method=method) for method in ("all-gather", "ring"))
    repeated = steps("llama3-8b", gathered, ring).repeated_backward_s
    assert repeated[1] < repeated[0]


def test_shares_by_flops_are_those_of_what_is_compiled() -> None:
    layouts = [SPLIT, SPLIT.replace(ep=8), SPLIT.replace(schedule="1F1B")]
    whole, in_parts, unsplit = repeated_share(configs("qwen3-30b-a3b", *layouts))
    # All stages of four but the first split their backwards.
    assert whole == pytest.approx(3 / 4)
    assert unsplit == 0.0
    share = compiled_share(configs("qwen3-30b-a3b", *layouts))
    assert np.allclose(share, [1.0, in_parts / whole, 1.0])
    assert 0.3 < share[1] < 0.7
