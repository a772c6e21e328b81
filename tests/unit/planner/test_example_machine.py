"""A machine that is not calibrated is predicted with the rates of another, and its interval says so."""

from meshwright.hardware.catalogue import load_cluster, with_example_rates
from meshwright.planner.candidate import judge
from meshwright.spec.layout.layout import Layout
from questions import ask


def test_the_interval_of_an_example_is_wide() -> None:
    request = ask(num_devices=2)
    layout = Layout(dp_shard=2)
    known = judge(layout, request).estimate.relative_error
    local = with_example_rates(load_cluster("local").with_num_devices(2))
    found = judge(layout, request.with_setup(cluster=local)).estimate
    assert known < 0.5
    assert found.relative_error >= 2
