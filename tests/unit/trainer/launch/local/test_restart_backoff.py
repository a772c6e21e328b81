"""RestartBackoff waits only while attempts reach no new step, and ever longer, up to a limit."""

import pytest

from meshwright.trainer.launch.local.restart_backoff import RestartBackoff


@pytest.mark.parametrize(
    ("steps", "delays"),
    [
        ([5, 9, 12], [0, 0, 0]),
        # One attempt without a new step is no reason to wait; each further one doubles the delay.
        ([5, 5, 5, 4, 5], [0, 0, 2, 4, 8]),
        ([0, 0, 0], [0, 2, 4]),
        # A new step starts it afresh.
        ([5, 5, 5, 6, 6, 6], [0, 0, 2, 0, 0, 2]),
    ],
)
def test_delays_grow_while_no_new_step_is_reached(steps: list[int], delays: list[float]) -> None:
    backoff = RestartBackoff(2.0)
    assert [backoff.delay_s(step) for step in steps] == delays


def test_steps_of_an_earlier_run_are_no_progress() -> None:
    backoff = RestartBackoff(2.0, furthest_step=7)
    assert [backoff.delay_s(7) for _ in range(3)] == [0, 2, 4]


@pytest.mark.parametrize(("first_s", "longest_s"), [(2.0, 60.0), (300.0, 300.0), (0.0, 0.0)])
def test_delays_have_a_limit(first_s: float, longest_s: float) -> None:
    backoff = RestartBackoff(first_s)
    assert [backoff.delay_s(0) for _ in range(5000)][-1] == longest_s
