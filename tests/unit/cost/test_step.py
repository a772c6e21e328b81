"""A step is the sum of its causes, none below zero, whatever it is priced next to; better hardware is never slower."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_configs import BATCH, MODELS, SEQ_LEN, changed, configs, layouts, training_setup
from meshwright.cost.constants import fitted_constants
from meshwright.cost.layout_table import layout_table
from meshwright.cost.stack_factors import stacks
from meshwright.cost.step import StepTerms
from meshwright.cost.step_times import step_times
from meshwright.cost.training_setup import Configurations, TrainingSetup
from meshwright.hardware.catalogue import cluster_names, load_cluster
from meshwright.spec.frozen import Frozen
from meshwright.spec.layout.layout import Layout
from meshwright.spec.machine.cluster import Cluster, Link
from meshwright.spec.machine.device import Figure, MatmulRates

TERMS = [field.name for field in fields(StepTerms)]
CLUSTERS = ("h100-ib400", "dgx-a100-hdr", "b200-ib400", "gb200-nvl72", "mi300x-roce400")
PRECISIONS = ("bfloat16", "float16", "float8-tensorwise", "float8-rowwise", "mxfp8")
SOME_LAYOUTS = st.sampled_from(MODELS).flatmap(lambda model: st.tuples(st.just(model), layouts(model)))


def total_s(of: TrainingSetup, *several: Layout) -> list[float]:
    return [float(seconds) for seconds in step_times(configs(of, *several)).total_s]


@pytest.mark.slow
@settings(max_examples=30)
@given(SOME_LAYOUTS, st.sampled_from(CLUSTERS), st.sampled_from(sorted(stacks())), st.sampled_from(PRECISIONS))
def test_causes_are_not_negative_and_sum_to_the_step(
    case: tuple[str, Layout], cluster: str, stack: str, precision: str
) -> None:
    model, layout = case
    if cluster.startswith("dgx-a100"):
        precision = "bfloat16"
    step = step_times(configs(training_setup(model, cluster, stack, precision=precision), layout))
    values = {name: float(getattr(step, name)[0]) for name in TERMS}
    assert np.isfinite(list(values.values())).all(), values
    assert min(values.values()) >= -1e-9 * step.total_s[0], values
    assert sum(values.values()) == pytest.approx(step.total_s[0])
    # As the noun it is the same step.
    assert step.decomposition(0).total_s == pytest.approx(step.total_s[0])
    assert {name for name in TERMS if values[name] > 0} >= {
        "model_flops_at_peak_s",
        "memory_bound_ops_s",
        "optimizer_s",
    }


def test_muon_exchanges_matrices_along_the_axes_that_cut_them() -> None:
    adamw, muon = (
        step_times(
            configs(
                training_setup("llama3-8b", "h100-ib400", "meshwright", optimizer=name),
                Layout(tp=2),
                Layout(dp_shard=2),
            )
        )
        for name in ("adamw", "muon")
    )
    over_tp, over_dp = (
        muon.tp_communication_s - adamw.tp_communication_s,
        muon.dp_communication_s - adamw.dp_communication_s,
    )
    assert muon.dp_communication_s[0] == 0 < over_tp[0]
    assert over_tp[1] == 0 < over_dp[1]


def test_muon_starts_kernels_for_each_matrix() -> None:
    adamw, muon = (
        step_times(configs(training_setup("llama-1m", "h100-ib400", "meshwright", optimizer=name), Layout(tp=2)))
        for name in ("adamw", "muon")
    )
    # 28 matrices, of each a half: too small to take longer than their kernels take to start.
    starts_s = 28 * (5 + 19 / 2) * fitted_constants()["kernel_s"]
    assert starts_s < muon.optimizer_s[0] - adamw.optimizer_s[0] < 1.5 * starts_s


@pytest.mark.parametrize("precision", ["float8-rowwise", "float8-rowwise-with-gw-hp"])
def test_gradients_of_rows_that_are_faster_than_forward_leave_tiles_a_cost(precision: str) -> None:
    setup = training_setup("llama3-8b", "h100-ib400", "meshwright", precision=precision)
    step = step_times(configs(setup, Layout(dp_shard=2, cp=16)))
    assert step.tile_and_wave_quantization_s[0] > 0
    assert step.gemm_inefficiency_s[0] > 0


@pytest.mark.slow
@settings(max_examples=12)
@given(st.lists(st.tuples(SOME_LAYOUTS, st.sampled_from(CLUSTERS), st.sampled_from(sorted(stacks()))), min_size=2))
def test_a_case_takes_as_long_alone_as_among_others(drawn: list[tuple[tuple[str, Layout], str, str]]) -> None:
    several = tuple(training_setup(model, cluster, stack) for (model, _), cluster, stack in drawn)
    table = layout_table([layout for (_, layout), _, _ in drawn])
    together = step_times(Configurations(several, np.arange(len(drawn)), table))
    for row, of in enumerate(several):
        alone = step_times(Configurations.of_one(of, table.take(np.array([row]))))
        for name in TERMS:
            assert getattr(together, name)[row] == pytest.approx(getattr(alone, name)[0], rel=1e-9, abs=1e-12), name


@pytest.mark.slow
@given(SOME_LAYOUTS)
def test_a_layout_twice_takes_as_long_twice(case: tuple[str, Layout]) -> None:
    first, other, again = total_s(training_setup(case[0]), case[1], Layout(dp_shard=64), case[1])
    assert first == again
    assert other == total_s(training_setup(case[0]), Layout(dp_shard=64))[0]


def with_faster(cluster: Cluster, what: str, factor: float) -> Cluster:
    """Return the cluster with one kind of figure multiplied."""

    def times(figure: Figure | None) -> Figure | None:
        return None if figure is None else figure.replace(value=figure.value * factor)

    def link_times(link: Link | None) -> Link | None:
        names = ("bytes_per_s", "bytes_per_s_per_peer")
        return None if link is None else link.replace(**{name: times(getattr(link, name)) for name in names})

    device = cluster.device
    if what == "compute":
        rates: Frozen = device.dense_flops_per_s
        faster = MatmulRates(**{name: times(getattr(rates, name)) for name in MatmulRates.model_fields})
        return cluster.replace(device=device.replace(dense_flops_per_s=faster))
    if what == "memory":
        return cluster.replace(device=device.replace(memory_bytes_per_s=times(device.memory_bytes_per_s)))
    return cluster.replace(**{what: link_times(getattr(cluster, what))})


@pytest.mark.slow
@settings(max_examples=30)
@given(
    SOME_LAYOUTS,
    st.sampled_from(CLUSTERS),
    st.sampled_from(["generic", "megatron-core-2024", "megatron-2021"]),
    st.sampled_from(["compute", "memory", "intra_node", "inter_node"]),
    st.floats(1.01, 8.0),
)
def test_better_hardware_is_never_slower(
    case: tuple[str, Layout], name: str, stack: str, what: str, factor: float
) -> None:
    model, layout = case
    cluster = load_cluster(name)
    own, faster = (
        total_s(training_setup(model, one, stack), layout)[0] for one in (cluster, with_faster(cluster, what, factor))
    )
    assert faster <= own * (1 + 1e-9)


@pytest.mark.slow
@settings(max_examples=20)
@given(SOME_LAYOUTS, st.sampled_from(sorted(stacks())))
def test_computing_again_is_never_faster(case: tuple[str, Layout], stack: str) -> None:
    model, layout = case
    every = [layout.replace(activation_checkpoint="full", activation_checkpoint_every=n) for n in (1, 2, 4)]
    selective, none = (layout.replace(activation_checkpoint=policy) for policy in ("selective", "none"))
    full_s, half_s, quarter_s, selective_s, none_s = total_s(
        training_setup(model, stack=stack), *every, selective, none
    )
    # Blocks are counted within their stage: every second and every fourth of a stage of two are the same.
    assert full_s >= half_s >= quarter_s > none_s
    assert full_s > selective_s > none_s


def test_a_step_without_recomputation_has_none() -> None:
    step = step_times(configs(training_setup(), Layout(dp_shard=64), Layout(dp_shard=64, activation_checkpoint="full")))
    assert step.recomputation_s[0] == 0
    # Full recomputation is one forward more: a third of the matmuls of the three passes.
    forward_s = (step.model_flops_at_peak_s + step.gemm_inefficiency_s + step.tile_and_wave_quantization_s)[1] / 3
    assert forward_s < step.recomputation_s[1] < 2 * forward_s


@pytest.mark.parametrize("stack", ["generic", "megatron-core-2024", "megatron-2020"])
@pytest.mark.parametrize("layout", [Layout(dp_shard=8, tp=4, cp=2), Layout(pp=4, dp_shard=4, tp=4)])
def test_a_step_grows_by_the_same_with_each_microbatch(layout: Layout, stack: str) -> None:
    steps = [total_s(training_setup(stack=stack, global_batch_size=64 * n), layout)[0] for n in (1, 2, 3)]
    if layout.pp > 1 and stack == "generic":
        # A pipeline gathers parameters once a step, which more microbatches hide more of.
        assert 0 < steps[1] - steps[0] <= (steps[2] - steps[1]) * (1 + 1e-9)
    else:
        assert steps[2] - steps[1] == pytest.approx(steps[1] - steps[0])
    # What is once a step, the bubble included, does not grow.
    assert steps[0] > steps[1] - steps[0]


def test_accumulating_gradients_is_no_faster_than_one_microbatch() -> None:
    once, twice, often = total_s(
        training_setup(global_batch_size=64 * 4), *(Layout(dp_shard=64, microbatch_size=size) for size in (4, 2, 1))
    )
    assert once < twice < often


def test_a_deeper_bubble_costs_more() -> None:
    few, many = (training_setup("llama3-70b", stack="megatron-core-2024", global_batch_size=n) for n in (8, 512))
    layout = Layout(pp=8, dp_shard=1, tp=8)
    shares = [
        float(step.pipeline_bubble_s[0] / step.total_s[0])
        for step in (step_times(configs(of, layout)) for of in (few, many))
    ]
    assert shares[0] > 3 * shares[1] > 0


@pytest.mark.parametrize("name", sorted(set(cluster_names()) - {"cpu-local", "local"}))
def test_no_device_of_the_catalogue_is_used_more_than_whole(name: str) -> None:
    cluster = load_cluster(name)
    rates = cluster.device.dense_flops_per_s
    for precision, dtype in (("bfloat16", "bfloat16"), ("float16", "float16"), ("float8-tensorwise", "float8")):
        if getattr(rates, dtype) is None:
            continue
        for stack in ("generic", "megatron-bridge-26"):
            # A node full of long matmuls: as much as a device can be used.
            of = training_setup("llama3-70b", cluster, stack, precision=precision)
            layout = Layout(dp_shard=cluster.devices_per_node)
            peak = cluster.device.peak_flops_per_s(dtype)
            assert peak is not None
            ideal_s = of.model.flops_per_token(SEQ_LEN) * SEQ_LEN * BATCH / (peak * layout.num_ranks)
            assert 0.05 < ideal_s / total_s(of, layout)[0] < 0.85


def test_the_floor_is_model_flops_over_the_dense_peak() -> None:
    of = training_setup()
    peak = of.cluster.device.peak_flops_per_s("bfloat16")
    assert peak is not None
    floor = of.model.flops_per_token(SEQ_LEN) * SEQ_LEN * BATCH / (64 * peak)
    same = [
        Layout(dp_shard=64),
        Layout(dp_shard=8, tp=4, cp=2),
        Layout(pp=4, dp_shard=16, activation_checkpoint="full"),
    ]
    assert step_times(configs(of, *same)).model_flops_at_peak_s == pytest.approx([floor] * 3)


def test_more_ranks_wait_longer_for_the_slowest() -> None:
    step = step_times(configs(training_setup(), Layout(dp_shard=8), Layout(dp_shard=64), Layout(dp_shard=512)))
    shares = step.stragglers_s / step.total_s
    assert shares[0] == 0
    assert 0 < shares[1] < shares[2] < 0.2


def test_given_constants_are_taken_instead_of_the_fitted_ones() -> None:
    one = configs(training_setup(), Layout(dp_shard=64))
    slower = {**fitted_constants(), "step_s": fitted_constants()["step_s"] + 1.0}
    assert step_times(one, slower).cpu_bound_s - step_times(one).cpu_bound_s > 0.9


def test_multipliers_of_a_stack_scale_what_they_name() -> None:
    of = training_setup()
    layout = Layout(dp_shard=8, tp=8)
    plain, compute, communication, overhead = (
        step_times(configs(changed(of, **factor), layout))
        for factor in ({}, {"compute": 2.0}, {"communication": 2.0}, {"overhead": 2.0})
    )
    assert compute.total_s > plain.total_s
    assert compute.tp_communication_s == pytest.approx(plain.tp_communication_s)
    assert communication.tp_communication_s > 1.8 * plain.tp_communication_s
    assert communication.memory_bound_ops_s == pytest.approx(plain.memory_bound_ops_s)
    assert overhead.optimizer_s == pytest.approx(2 * plain.optimizer_s)
    assert overhead.tile_and_wave_quantization_s == pytest.approx(plain.tile_and_wave_quantization_s)


def test_a_device_waits_for_what_the_host_of_our_kernels_needs_longer() -> None:
    setup = training_setup("qwen3-0.6b", stack="meshwright", seq_len=128, global_batch_size=8)
    one = configs(setup, Layout(dp_shard=8))

    def waits_s(launch_s: float) -> float:
        return float(step_times(one, {**fitted_constants(), "launch_s.eager": launch_s}).cpu_bound_s[0])

    fixed_s = waits_s(0.0)
    assert waits_s(1e-7) == fixed_s
    # Of a host that is slower than all blocks, each further second is waited for.
    assert waits_s(0.03) - waits_s(0.02) == pytest.approx(waits_s(0.02) - waits_s(0.01))
    assert waits_s(0.01) > 100 * fixed_s
