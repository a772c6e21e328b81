"""Seconds and bytes of adapters on a frozen base, next to a step that trains everything."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_configs import configs, training_setup
from meshwright.cost.blocks.work import work_of
from meshwright.cost.communication.data_parallel import DataParallel
from meshwright.cost.memory.footprint import Footprint, footprint
from meshwright.cost.memory.footprint_tensors import Formats, kept_bytes
from meshwright.cost.step_times import step_times
from meshwright.cost.training_setup import TrainingSetup
from meshwright.spec.layout.layout import Layout
from meshwright.spec.step.adapter import Adapter

MODEL, FSDP = "llama3-8b", Layout(dp_shard=8)
ATTENTION = ("blocks.*.attention.*",)
STACKS = ("meshwright", "generic", "mlperf-v5", "megatron-core-2026", "torchtitan-2025")


LONG_LAYOUTS = st.builds(
    lambda pp, dp_shard, **others: Layout(pp=pp, dp_shard=dp_shard, dp_replicate=64 // (pp * dp_shard), **others),
    pp=st.sampled_from([1, 2, 4]),
    dp_shard=st.sampled_from([1, 4, 16]),
    microbatch_size=st.sampled_from([1, 2]),
    activation_checkpoint=st.sampled_from(["none", "full"]),
)
"""Of whole sequences on each rank: of a few tokens adapters' kernels take longer than what they save, and selective
recomputation saves what they make."""


def with_adapter(of: TrainingSetup, **adapter: Any) -> TrainingSetup:
    return replace(of, workload=of.workload.replace(adapter=Adapter(**({"kind": "lora"} | adapter))))


def setup(stack: str = "meshwright", model: str = MODEL, **workload: Any) -> TrainingSetup:
    return training_setup(model, stack=stack, **({"global_batch_size": 64} | workload))


def memory(of: TrainingSetup, layout: Layout = FSDP) -> Footprint:
    return footprint(configs(of, layout))


def total_s(of: TrainingSetup, layout: Layout = FSDP) -> float:
    return float(step_times(configs(of, layout)).total_s[0])


@pytest.mark.parametrize("stack", STACKS)
def test_an_adapter_of_kind_none_changes_nothing(stack: str) -> None:
    of = setup(stack)
    other = with_adapter(of, kind="none", rank=64, targets=ATTENTION)
    assert step_times(configs(of, FSDP)).decomposition(0) == step_times(configs(other, FSDP)).decomposition(0)
    for field in fields(Footprint):
        assert getattr(memory(of), field.name) == getattr(memory(other), field.name)


@pytest.mark.parametrize(
    "stack", [pytest.param(name, marks=() if name == "meshwright" else pytest.mark.long) for name in STACKS]
)
@given(LONG_LAYOUTS)
def test_a_frozen_base_takes_less_time_and_memory(stack: str, layout: Layout) -> None:
    of = training_setup(MODEL, stack=stack)
    frozen = with_adapter(of, targets=ATTENTION)
    assert total_s(frozen, layout) < total_s(of, layout)
    assert memory(frozen, layout).device_bytes[0] < memory(of, layout).device_bytes[0]


@given(st.sampled_from(STACKS), st.integers(1, 128), st.integers(16, 128))
def test_more_rank_takes_no_less(stack: str, rank: int, more: int) -> None:
    of = setup(stack)
    small, large = with_adapter(of, rank=rank), with_adapter(of, rank=rank + more)
    assert total_s(small) <= total_s(large)
    assert memory(small).device_bytes[0] < memory(large).device_bytes[0]


@pytest.mark.parametrize("stack", ["meshwright", "generic"])
def test_gradients_and_states_are_those_of_the_adapters(stack: str) -> None:
    of = with_adapter(setup(stack))
    found, trained = memory(of), of.trained_model.num_trained_parameters
    # Dim 0 of A is its rank, which 8 ranks divide, and that of B the layer's.
    assert found.optimizer_state_bytes[0] == 8 * trained / 8
    assert found.gradients_bytes[0] <= 4 * trained / 8
    # All shards of a unit have one format.
    assert found.parameters_bytes[0] == pytest.approx(4 * of.trained_model.num_parameters / 8, rel=1e-4)


def test_a_whole_base_has_no_masters() -> None:
    of, layout = with_adapter(setup("megatron-core-2026")), Layout(dp_replicate=8)
    found = memory(of, layout)
    assert found.parameters_bytes[0] == pytest.approx(2 * of.trained_model.num_parameters, rel=1e-4)
    assert found.optimizer_state_bytes[0] == pytest.approx(12 * of.trained_model.num_trained_parameters / 8, rel=1e-4)


@pytest.mark.parametrize(("base_dtype", "of_weight"), [("int8", 1.03125), ("nf4", 0.53125)])
def test_a_base_of_few_bits(base_dtype: str, of_weight: float) -> None:
    plain, narrow = (with_adapter(setup("generic"), base_dtype=name) for name in ("compute", base_dtype))
    adapted = sum(
        group.count * op.num_parameters for group in plain.model.groups if group.name for op in group.ops[:-1]
    )
    saved = memory(plain).parameters_bytes[0] - memory(narrow).parameters_bytes[0]
    assert saved == pytest.approx((4 - of_weight) * adapted / 8, rel=0.001)
    # It is gathered so, and made wide for each matmul.
    work = work_of(configs(narrow, FSDP))
    saved = (work.blocks.narrow_gather_bytes * work.blocks.count).sum()
    assert saved == pytest.approx((2 - of_weight) * adapted, rel=0.001)
    terms, of_plain = (step_times(configs(one, FSDP)) for one in (narrow, plain))
    assert terms.memory_bound_ops_s[0] > of_plain.memory_bound_ops_s[0]
    assert terms.dp_communication_s[0] <= of_plain.dp_communication_s[0]


def test_all_of_the_base_is_gathered_and_only_adapters_are_reduced() -> None:
    of = with_adapter(setup())
    one = configs(of, FSDP)
    parallel = DataParallel(one, work_of(one))
    assert parallel.dense_parameters[0] == of.trained_model.num_parameters
    assert parallel.trained_dense_parameters[0] == of.trained_model.num_trained_parameters
    assert parallel.updated[0] == pytest.approx(of.trained_model.num_trained_parameters / 8)


def test_zero_1_exchanges_only_what_is_trained() -> None:
    of, layout = setup("megatron-core-2026"), Layout(dp_replicate=8)
    frozen = with_adapter(of)
    share = frozen.trained_model.num_trained_parameters / frozen.model.num_parameters
    whole, adapters = (step_times(configs(one, layout)).dp_communication_s[0] for one in (of, frozen))
    assert adapters < whole * (share + 0.05)


def kept_of_token(of: TrainingSetup) -> float:
    """Return the bytes that the last block keeps of a token for backward."""
    formats = Formats.of(of.workload, of.stack, of.stack.kernels)
    return sum(kept_bytes(of.trained_model.groups[-2].ops, formats, "none").values())


def test_an_input_is_kept_for_adapters_alone() -> None:
    of = setup("megatron-core-2026", precision="bfloat16")
    whole, some, few = map(kept_of_token, (of, with_adapter(of), with_adapter(of, targets=ATTENTION)))
    # A of each of 7 layers keeps what its layer kept, and B what A makes: rank 16.
    assert some == whole + 2 * 7 * 16
    # Without adapters of the network neither its norm's output nor what down reads is kept.
    assert few == whole + 2 * (4 * 16 - 4096 - 14_336)


def test_dropout_keeps_inputs_of_its_own() -> None:
    of = setup("megatron-core-2026")
    plain, dropped = (kept_of_token(with_adapter(of, targets=ATTENTION, dropout=share)) for share in (0.0, 0.1))
    # Query, key, value and output keep one of 4096 elements each, and its mask; the norm's output is kept for none.
    assert dropped - plain == 4 * 4096 * 3 - 2 * 4096


def test_a_frozen_weight_is_rounded_once_by_kernels_that_keep_it() -> None:
    of = setup("mlperf-v5", precision="float8-tensorwise")
    frozen, one = with_adapter(of, targets=ATTENTION), Layout(dp_replicate=8)
    base = of.model.num_parameters - 2 * 128_256 * 4096
    plain = memory(with_adapter(setup("mlperf-v5"), targets=ATTENTION), one).parameters_bytes[0]
    assert plain - memory(frozen, one).parameters_bytes[0] == pytest.approx(base, rel=1e-3)
    low, low_before = (work_of(configs(each, one)).matmuls for each in (frozen, of))
    assert not low.cast_weights[low.is_low].any()
    assert low.cast_inputs[low.is_low].any()
    assert low_before.cast_weights.any()


@pytest.mark.parametrize("stack", STACKS)
def test_everything_is_finite_and_not_negative(stack: str) -> None:
    for kind, model in (("lora", MODEL), ("dora", "qwen3-30b-a3b"), ("lora", "deepseek-v3")):
        of = with_adapter(setup(stack, model), kind=kind, dropout=0.1)
        layout = Layout(dp_shard=4, tp=2, ep=1)
        values = np.array([getattr(memory(of, layout), field.name) for field in fields(Footprint)])
        seconds = np.array([*step_times(configs(of, layout)).decomposition(0).to_dict().values()], np.float64)
        assert np.isfinite(values).all()
        assert (values >= 0).all()
        assert np.isfinite(seconds).all()


def test_row_norms_pass_through_the_weights() -> None:
    lora, dora = (step_times(configs(with_adapter(setup(), kind=kind), FSDP)) for kind in ("lora", "dora"))
    assert dora.memory_bound_ops_s[0] > lora.memory_bound_ops_s[0]
