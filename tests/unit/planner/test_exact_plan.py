"""A plan for exact sums prices what they add, and takes no layout that they refuse."""

from __future__ import annotations

import pytest

from meshwright.cost.layout_table import layout_table
from meshwright.planner.explain.layout_rules import rules_broken_by
from meshwright.planner.request import PlanRequest
from meshwright.planner.search.menu import menu_of
from meshwright.planner.search.price import price
from meshwright.spec.layout.layout import Layout
from questions import ask


def exact(request: PlanRequest) -> PlanRequest:
    """Return the same request with exact sums."""
    return request.with_setup(workload=request.workload.replace(sums_exactly=True, gradient_dtype="float64"))


def test_experts_are_not_shared() -> None:
    request = ask("mixtral-8x7b", 64)
    shared = Layout(dp_shard=64, ep=8)
    assert len(menu_of(request).ep) > 1
    assert menu_of(exact(request)).ep == (1,)
    assert not rules_broken_by(shared, request)
    assert [problem.subject for problem in rules_broken_by(shared, exact(request))] == ["layout.ep"]


@pytest.mark.parametrize(
    "layout",
    [Layout(dp_shard=16), Layout(dp_shard=16, gradient_sync="step"), Layout(dp_shard=8, dp_replicate=2)],
    ids=["each", "step", "replicas"],
)
def test_they_take_time_and_memory(layout: Layout) -> None:
    usual, sums = (price(layout_table([layout]), one, only_fitting=False) for one in (ask(), exact(ask())))
    assert 1 < sums.total_s[0] / usual.total_s[0] < 1.5
    # Float64 keeps 4 bytes more of each element: shards of gradients, or whole ones where a step is reduced once.
    held = 8.03e9 / (1 if layout.gradient_sync == "step" else layout.fsdp)
    added = sums.memory.device_bytes[0] - usual.memory.device_bytes[0]
    assert added == pytest.approx(4 * held, rel=0.5)
