"""The largest potential speedup of one key, and the formulas' step as the causes of one rank."""

from __future__ import annotations

import pytest

from meshwright.planner.candidate import judge
from meshwright.planner.explain.best_change import best_changes
from meshwright.planner.explain.explain import changes, listed, neighbours
from meshwright.planner.explain.predicted_causes import PricedFloor, floor_of, predicted_causes, share_of_rank
from meshwright.planner.search.menu import menu_of
from meshwright.spec.layout.layout import Layout
from meshwright.spec.step.estimate import StepDecomposition
from meshwright.spec.step.step_causes import Floor
from questions import ask

PIPELINED = Layout(pp=4, dp_shard=4, compile=True)


def test_the_change_is_priced_as_a_layout_with_it_is() -> None:
    request = ask(num_devices=8, seq_len=8192, batch=32)
    slow = Layout(dp_shard=8, compile=False)
    now = judge(slow, request)
    best = next(one for one in best_changes(slow, request) if not one.changes_numerics)
    assert best.change == "layout.compile=true"
    other = judge(slow.replace(compile=True), request)
    assert best.step_s == pytest.approx(other.step_s)
    assert best.saved_s == pytest.approx(now.step_s - other.step_s)
    assert best.error_s == pytest.approx(now.estimate.relative_error * now.step_s)


def test_a_change_of_degree_names_the_ranks_that_it_takes() -> None:
    request = ask("llama3-8b", 8, seq_len=8192, batch=32)
    wasteful = Layout(tp=8, dp_shard=1, compile=True, activation_checkpoint="selective")
    best = next(one for one in best_changes(wasteful, request) if not one.changes_numerics)
    keys = dict(change.split("=") for change in best.change.split(", "))
    assert best.saved_s > 0
    changed = {key.removeprefix("layout."): int(value) for key, value in keys.items()}
    assert wasteful.replace(**changed).num_ranks == wasteful.num_ranks


@pytest.mark.parametrize("boundaries", [None, (16,)])
def test_what_is_left_to_be_chosen_is_chosen_for_the_other_degrees(boundaries: tuple[int, ...] | None) -> None:
    request = ask("llama3-8b", 8, seq_len=8192, batch=32, cluster="h200-ib400")
    # "auto" keeps parameters in a pipeline and reduces once a step; without one it does neither.
    layout = Layout(pp=2, dp_shard=4, compile=True, activation_checkpoint="selective", stage_boundaries=boundaries)
    table = neighbours(layout, request, menu_of(request))
    row = next(row for row in range(len(table)) if table.pp[row] == 1)
    other = table.layout(row)
    assert (other.is_resharded, other.reduces_each_microbatch) == (True, True)
    left_out = {} if boundaries is None else {"stage_boundaries": None}
    assert changes(layout, other) == {"pp": 1, **left_out}
    assert listed(left_out) == ("" if boundaries is None else "stage_boundaries left out")


def test_a_lower_precision_is_named_as_one_that_changes_numerics() -> None:
    request = ask(num_devices=8, seq_len=8192, batch=32)
    found = best_changes(Layout(dp_shard=8, compile=True, activation_checkpoint="selective"), request)
    lower = [one for one in found if one.changes_numerics]
    assert [one.change.partition("=")[0] for one in lower] == ["precision.float8"]
    assert lower[0].saved_s >= max(one.saved_s for one in found)


def test_a_cpu_offloads_nothing() -> None:
    request = ask("llama-1m", 2, seq_len=256, batch=16, cluster="cpu-local")
    own = Layout(dp_shard=2, activation_checkpoint="none")
    table = neighbours(own, request, menu_of(request))
    assert not (table.cpu_offload | table.activation_offload).any()
    of_gpus = ask(num_devices=8)
    table = neighbours(Layout(dp_shard=8), of_gpus, menu_of(of_gpus))
    assert table.cpu_offload.any()
    assert table.activation_offload.any()


@pytest.mark.parametrize("layout", [Layout(dp_shard=16, compile=True), PIPELINED])
def test_the_floor_is_the_first_cause(layout: Layout) -> None:
    request = ask(batch=32)
    priced, step = floor_of(layout, request), judge(layout, request).estimate.step
    assert priced.floor.total_s == pytest.approx(step.model_flops_at_peak_s)
    assert priced.floor.attention_s > 0
    assert priced.host_s == 0.0


def test_a_slow_stage_computes_more_and_waits_less_of_the_same_step() -> None:
    request = ask(batch=32)
    step = judge(PIPELINED, request).estimate.step
    shares = [share_of_rank(PIPELINED, rank, request) for rank in range(4)]
    assert sum(shares) == pytest.approx(4)
    assert max(shares) > 1
    of_slowest = predicted_causes(step, floor_of(PIPELINED, request), max(shares))
    assert of_slowest.total_s == pytest.approx(step.total_s)
    assert of_slowest.pipeline_bubble_s < step.pipeline_bubble_s
    assert of_slowest.gemm_inefficiency_s > step.gemm_inefficiency_s
    assert of_slowest.model_flops_at_peak_s == step.model_flops_at_peak_s
    assert share_of_rank(Layout(dp_shard=16), 0, request) == 1.0


def test_a_hosts_own_time_is_split_from_its_kernels() -> None:
    step = StepDecomposition(model_flops_at_peak_s=1.0, memory_bound_ops_s=0.5, cpu_bound_s=0.0)
    found = predicted_causes(step, PricedFloor(Floor(1.0), 0.2))
    assert (found.memory_bound_ops_s, found.cpu_bound_s) == pytest.approx((0.3, 0.2))
    assert found.total_s == pytest.approx(step.total_s)
