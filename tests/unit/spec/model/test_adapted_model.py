"""A model with adapters, op by op: what is trained, what backward needs, what it computes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import ConfigError
from meshwright.spec.model.adapted_model import adapted_model
from meshwright.spec.model.model_spec import ModelSpec, model_spec
from meshwright.spec.model.op import CoreAttention, Matmul, Op
from meshwright.spec.model.presets import PRESETS
from meshwright.spec.step.adapter import Adapter

DENSE, MIXTURE, LATENT = "llama2-70b", "qwen3-30b-a3b", "deepseek-v3"
ATTENTION = ("blocks.*.attention.*",)
SEQ_LEN = 8192


def adapted(name: str = DENSE, **fields: Any) -> ModelSpec:
    return adapted_model(model_spec(PRESETS[name]), Adapter(**({"kind": "lora"} | fields)))


def ops_of_block(spec: ModelSpec, number: int = 1) -> dict[str, Op]:
    blocks = [group.ops for group in spec.groups if group.name for _ in range(group.count)]
    return {op.name: op for op in blocks[number]}


def layer_sizes(name: str, targets: str = "") -> list[tuple[int, int]]:
    """Return (in, out) of the linear layers of all blocks whose names begin with `targets`."""
    return [
        (op.in_features, op.out_features)
        for group in model_spec(PRESETS[name]).groups
        if group.name
        for op in group.ops
        if isinstance(op, Matmul) and op.part != "router" and op.name.startswith(targets)
        for _ in range(group.count)
    ]


def test_without_an_adapter_a_model_stays_what_it_is() -> None:
    spec = model_spec(PRESETS[DENSE])
    assert adapted_model(spec, Adapter()) is spec
    assert spec.num_trained_parameters == spec.num_parameters


@pytest.mark.parametrize("name", [DENSE, MIXTURE, LATENT])
@pytest.mark.parametrize("rank", [1, 16, 64])
def test_lora_trains_rank_times_in_and_out_of_each_layer(name: str, rank: int) -> None:
    base, spec = model_spec(PRESETS[name]), adapted(name, rank=rank)
    expected = sum(rank * (inputs + outputs) for inputs, outputs in layer_sizes(name))
    assert spec.num_trained_parameters == expected
    assert spec.num_parameters == base.num_parameters + expected


def test_dora_trains_the_norm_of_each_row_besides() -> None:
    rows = sum(outputs for _, outputs in layer_sizes(DENSE))
    assert adapted(kind="dora").num_trained_parameters == adapted().num_trained_parameters + rows


def test_targets_are_names_of_layers() -> None:
    expected = sum(16 * (inputs + outputs) for inputs, outputs in layer_sizes(DENSE, "attention."))
    assert adapted(targets=ATTENTION).num_trained_parameters == expected
    # Of MLPerf's fine-tuning of this model: rank 16 on all projections of attention.
    assert expected == 65_536_000


def test_experts_router_embedding_and_head_have_no_adapters() -> None:
    spec = adapted(MIXTURE, targets=("*",))
    names = [op.name for group in spec.groups for op in group.ops if getattr(op, "adapter_matrix", "none") == "A"]
    assert {name.split(".")[0] for name in names} == {"attention"}
    assert all(op.is_frozen for op in ops_of_block(spec).values() if not op.name.endswith(("lora_a", "lora_b")))


def test_targets_that_match_nothing_name_what_there_is() -> None:
    with pytest.raises(
        ConfigError, match=r"adapter.targets = \['blocks.\*.wq'\] match no .* blocks.\*.attention.query"
    ):
        adapted(targets=("blocks.*.wq",))


def test_a_frozen_weight_costs_two_passes_and_attention_three() -> None:
    spec, base = adapted(), model_spec(PRESETS[DENSE])
    ops, before = ops_of_block(spec), ops_of_block(base)
    down, rank = before["ffn.down"], 16
    forward = down.forward_flops_per_token(SEQ_LEN)
    assert ops["ffn.down"].training_flops_per_token(SEQ_LEN) == 2 * forward
    assert ops["ffn.down.lora_a"].training_flops_per_token(SEQ_LEN) == 3 * 2 * rank * down.in_features
    assert ops["ffn.down.lora_b"].training_flops_per_token(SEQ_LEN) == 3 * 2 * rank * down.out_features
    core = next(op for op in ops.values() if isinstance(op, CoreAttention))
    assert core.training_flops_per_token(SEQ_LEN) == 3 * core.forward_flops_per_token(SEQ_LEN)


def test_model_flops_are_four_for_a_frozen_weight_and_six_for_a_trained_one() -> None:
    base = model_spec(PRESETS[DENSE])
    attention = 3 * sum(
        group.count * op.forward_flops_per_token(SEQ_LEN)
        for group in base.groups
        for op in group.ops
        if isinstance(op, CoreAttention)
    )
    weights = sum(group.count * group.num_matmul_parameters for group in base.groups)
    first = ops_of_block(base, 0)
    # What reads the embedding, which is frozen, needs no gradient of its input; neither do the A of its adapters.
    needless = [first[f"attention.{name}"] for name in ("query", "key", "value")]
    left_out = sum(op.forward_flops_per_token(SEQ_LEN) + 2 * 16 * op.in_features for op in needless)
    spec = adapted()
    assert spec.flops_per_token(SEQ_LEN) == 4 * weights + 6 * spec.num_trained_parameters + attention - left_out


def test_backward_ends_at_the_first_layer_that_is_trained() -> None:
    spec = adapted(targets=("blocks.2.ffn.down", "blocks.5.*"))
    needs = [ops_of_block(spec, number)["ffn.up"].has_input_gradient for number in range(7)]
    assert needs == [False, False, False, True, True, True, True]
    down = ops_of_block(spec, 2)
    assert not down["ffn.down.lora_a"].has_input_gradient
    assert down["ffn.down.lora_b"].has_input_gradient
    assert [len(ops_of_block(spec, number)) for number in (1, 2, 3, 5)] == [
        len(ops_of_block(model_spec(PRESETS[DENSE]))) + more for more in (0, 3, 0, 3 * 7)
    ]


@given(st.integers(1, 256), st.integers(1, 256), st.sampled_from([DENSE, MIXTURE, LATENT]))
def test_more_rank_trains_and_computes_more(one: int, more: int, name: str) -> None:
    small, large = adapted(name, rank=one), adapted(name, rank=one + more)
    assert small.num_trained_parameters < large.num_trained_parameters
    assert small.flops_per_token(SEQ_LEN) < large.flops_per_token(SEQ_LEN)
    assert sum(group.count for group in small.groups) == sum(group.count for group in model_spec(PRESETS[name]).groups)
